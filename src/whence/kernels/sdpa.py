def refuse(call):
    return "later"


def note(call):
    return ""


def run(call): ...
