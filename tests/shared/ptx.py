"""PTX, the assembly that Triton compiles kernels to, translated to NumPy over all threads at once.

    kernel = Kernel(compiled.asm["ptx"])
    kernel.blocks[0](registers, machine, mask)    # the first basic block; returns the next

A register is an array with a number for each thread. `ptx_machine.py` runs a kernel.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
FLOATS = {"f16": "float16", "f32": "float32", "f64": "float64"}
END = 1 << 30  # the number of the block after a kernel's end
ROUNDINGS = {"rni": "rint", "rmi": "floor", "rpi": "ceil", "rzi": "trunc"}
TYPE = re.compile(r"(pred|tf32|bf16x2|f16x2|bf16|[subf](?:8|16|32|64))$")
SPECIAL = re.compile(r"%(n?tid|n?ctaid|laneid|warpid)(?:\.([xyz]))?$")
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# What is translated of each instruction: a pattern of what stands after its name.
INTEGER, ANY = r"[us](16|32|64)", r"([busf](16|32|64))"
WARP = r"sync\.aligned\."
FORMS = {
    "abs": r"f32|s32",
    "add": rf"(rn\.)?f(32|64)|rn\.bf16(x2)?|{INTEGER}",
    "and": r"b(16|32|64)|pred",
    "bar": r"sync|warp\.sync",
    "bfe": r"[us]32",
    "bra": r"(uni)?",
    "copysign": r"f32",
    "cp": r"async\.((ca|cg)\.shared\.global|commit_group|wait_group|wait_all)",
    "cvt": r"f32\.b?f16|f64\.f32|rn\.f32\.f64|rn\.b?f16(x2)?\.f32|rn\.satfinite\.f16x2\.f32"
    r"|r[nmpz]i\.(ftz\.)?f32\.f32|r[nmpz]i\.f64\.f64|rn\.f(32|64)\.[us](32|64)|r[nmpz]i\.[us]32\.f32"
    rf"|{INTEGER}\.{INTEGER}",
    "div": r"(full|approx|rn)\.f32|[us](32|64)",
    "ex2": r"approx\.(ftz\.)?f32",
    "exit": "",
    "fence": r"proxy\.async\.shared::cta",
    "fma": r"rn\.(ftz\.)?f32",
    "griddepcontrol": r"wait|launch_dependents",
    "ld": rf"(param|global(\.nc)?|shared)\.(v[24]\.)?([busf]8|{ANY})",
    "ldmatrix": WARP + r"m8n8\.x[124]\.(trans\.)?shared\.b16",
    "lg2": r"approx\.(ftz\.)?f32",
    "lop3": r"b32",
    "mad": r"lo\.[us](32|64)|wide\.[us](16|32)",
    "max": r"f32|[us](32|64)|relu\.s32",
    "min": r"f32|[us](32|64)|relu\.s32",
    "mma": WARP
    + r"(m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)|m16n8k8\.row\.col\.f32\.tf32\.tf32)\.f32",
    "mov": rf"{ANY}|pred",
    "mul": r"(rn\.)?f(32|64)|rn\.bf16(x2)?|hi\.[us]32|lo\.[us](16|32|64)|wide\.[us](16|32)",
    "neg": r"f32|s(32|64)",
    "not": r"b(16|32|64)|pred",
    "or": r"b(16|32|64)|pred",
    "popc": r"b(32|64)",
    "prmt": r"b32",
    "redux": r"sync\.(min|max|add)\.[us]32",
    "rem": r"[us](32|64)",
    "ret": r"(uni)?",
    "selp": ANY,
    "setp": rf"[a-z]+\.((and|or|xor)\.)?([bf](32|64)|b16|{INTEGER})",
    "shf": r"[lr]\.(wrap|clamp)\.b32",
    "shfl": r"sync\.(bfly|idx)\.b32",
    "shl": r"b(16|32|64)",
    "shr": r"[bus](16|32|64)",
    "st": rf"(global|shared)\.(v[24]\.)?([busf]8|{ANY})",
    "stmatrix": WARP + r"m8n8\.x[124]\.(trans\.)?shared\.b16",
    "sub": rf"(rn\.)?f(32|64)|rn\.bf16(x2)?|{INTEGER}",
    "wgmma": r"(fence|commit_group|wait_group)\.sync\.aligned"
    rf"|mma_async\.{WARP}m64n\d+(k16\.f32\.(bf16\.bf16|f16\.f16)|k8\.f32\.tf32\.tf32)",
    "xor": r"b(16|32|64)|pred",
}


class UnknownError(Exception):
    """An instruction that is not translated."""


def size_of(kind: str) -> int:
    """Bytes of a type."""
    if kind in ("f16x2", "bf16x2", "tf32"):
        return 4
    return SIZES[kind.removeprefix("b").lstrip("subf")]


def dtype_of(kind: str) -> str:
    """The NumPy type of a type; bits are unsigned numbers."""
    if kind in FLOATS:
        return FLOATS[kind]
    if kind[0] == "s":
        return f"int{8 * size_of(kind)}"
    return f"uint{8 * size_of(kind)}"


class Statement:
    """One instruction: guard, opcode with its modifiers, and operands."""

    def __init__(self, text: str) -> None:
        found = re.match(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text, re.DOTALL)
        if found is None:
            raise UnknownError(text)
        negated, self.guard, opcode, rest = found.groups()
        self.negated = bool(negated)
        self.text = text
        self.name, *self.modifiers = [part for part in re.split(r"(?<!:)[.](?!:)", opcode) if part]
        self.operands = split(rest)
        self.types = [part for part in self.modifiers if TYPE.match(part)]

    @property
    def type(self) -> str:
        """The last of its types."""
        return self.types[-1]

    def has(self, modifier: str) -> bool:
        """Whether it has this modifier."""
        return modifier in self.modifiers


def split(text: str) -> list[str]:
    """Operands between commas, of which those in braces are one."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


class Kernel:
    """The basic blocks of a kernel as functions, and what it declares."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
        ptx = re.sub(r"^\s*\.(loc|file)\b[^\n]*$", "", ptx, flags=re.MULTILINE)
        head = re.search(r"\.entry\s+(\w+)\((.*?)\).*?\{", ptx, re.DOTALL)
        assert head is not None
        self.name = head.group(1)
        self.params = re.findall(r"\w+_param_\d+", head.group(2))
        self.registers: list[int] = []  # bytes of each, 0 for a predicate
        self.shared: dict[str, int] = {}  # bytes that assembly reserves
        self.constants: dict[str, Any] = {}
        self.waits = False  # for the kernel before it
        self._scopes: list[dict[str, int | str]] = [{}]
        self._labels: dict[str, int] = {}
        self._lines: list[list[Any]] = [[]]
        self._body(ptx[head.end() :])
        self.blocks = [Block(self, number) for number in range(len(self._lines))]

    # Parsing.

    def _body(self, text: str) -> None:
        place, scopes = 0, 0
        while True:
            while text[place].isspace():
                place += 1
            if text[place] == "{":
                self._scopes.append({})
                scopes, place = scopes + 1, place + 1
                continue
            if text[place] == "}":
                if scopes == 0:
                    return
                self._scopes.pop()
                scopes, place = scopes - 1, place + 1
                continue
            if text[place] == ";":
                place += 1
                continue
            label = re.compile(r"([$%\w]+):(?!:)").match(text, place)
            if label:
                self._next_block()
                if label.group(1) in self._labels:
                    raise UnknownError(f"a second label {label.group(1)}")
                self._labels[label.group(1)] = len(self._lines) - 1
                place = label.end()
                continue
            stop = text.index(";", place)
            self._statement(text[place:stop].strip())
            place = stop + 1

    def _next_block(self) -> None:
        if self._lines[-1]:
            self._lines.append([])

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, *names = text.replace(",", " ").split()
            size = 0 if kind == ".pred" else size_of(kind[1:])
            for name in names:
                many = re.match(r"(%\w+)<(\d+)>", name)
                for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                    self._scopes[-1][each] = len(self.registers)
                    self.registers.append(size)
            return
        if text.startswith(".shared"):
            ((name, size_text),) = re.findall(r"\.b8\s+(\w+)\[(\d+)\]", text)
            unique = f"{name}#{len(self.shared)}"
            self._scopes[-1][name] = unique
            self.shared[unique] = int(size_text)
            return
        if text.startswith("."):
            return
        statement = Statement(text)
        self.waits |= statement.name == "griddepcontrol" and statement.has("wait")
        names = {x: self._found(x) for x in re.findall(r"[%\w$]+", text)}
        self._lines[-1].append((statement, {x: y for x, y in names.items() if y is not None}))
        if statement.name in ("bra", "ret", "exit", "bar") and not statement.has("warp"):
            self._next_block()

    def _found(self, name: str) -> int | str | None:
        """The number of a register, or the name of reserved memory, in the innermost scope."""
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    # Translating.

    def source(self, number: int, whole: bool) -> str:
        """A block as Python; `whole` where all threads run it."""
        lines = ["def block(R, S, M):"]
        for statement, names in self._lines[number]:
            of_statement = Translation(self, statement, names, whole, number)()
            lines += [f"    {line}" for line in of_statement]
        following = number + 1 if number + 1 < len(self._lines) else END
        return "\n".join([*lines, f"    return {following}"])

    def label(self, name: str) -> int:
        """The block at a label."""
        return self._labels[name]

    def constant(self, value: Any) -> str:
        """The name under which a block finds this value."""
        name = f"K_{type(value).__name__}_{value.tobytes().hex()}"
        self.constants[name] = value
        return name


class Block:
    """A basic block, translated when it is first run."""

    def __init__(self, kernel: Kernel, number: int) -> None:
        self._kernel, self._number = kernel, number
        self._made: dict[bool, Callable[..., Any]] = {}

    def __call__(self, registers: list[Any], machine: Any, mask: Any, whole: bool) -> Any:
        if whole not in self._made:
            source = self._kernel.source(self._number, whole)
            space = {"np": np, "where": np.where, **FUNCTIONS}
            space |= self._kernel.constants
            exec(compile(source, f"{self._kernel.name} block {self._number}", "exec"), space)
            self._made[whole] = space["block"]
        return self._made[whole](registers, machine, mask)


class Translation:
    """One instruction as lines of Python."""

    def __init__(
        self, kernel: Kernel, statement: Statement, names: dict[str, Any], whole: bool, number: int
    ) -> None:
        self.kernel, self.s, self.names = kernel, statement, names
        self.whole, self.number = whole, number
        self.guard = None
        if statement.guard:
            self.guard = f"R[{names[statement.guard]}]"
            if statement.negated:
                self.guard = f"~{self.guard}"
        parts = [x for x in (None if whole else "M", self.guard) if x]
        self.condition = " & ".join(parts)  # under which a thread runs it; "" for all
        self.mask = self.condition or "M"

    def __call__(self) -> list[str]:
        form = FORMS.get(self.s.name)
        if form is None or not re.fullmatch(form, ".".join(self.s.modifiers)):
            raise UnknownError(self.s.text)
        lines = getattr(self, f"op_{self.s.name}")()
        return lines if isinstance(lines, list) else [lines]

    # Operands and results.

    def read(self, operand: str, kind: str) -> str:
        """An operand as an expression of a type."""
        operand = operand.strip()
        if operand.startswith("!"):
            return f"(~{self.read(operand[1:], kind)})"
        if operand in self.names and isinstance(self.names[operand], int):
            place = self.names[operand]
            size, wanted = self.kernel.registers[place], 0 if kind == "pred" else size_of(kind)
            text = f"R[{place}]"
            if kind == "pred":
                return text
            if wanted < size:
                text = f"{text}.astype(np.{WORDS[wanted].__name__})"
            elif wanted > size:
                raise UnknownError(self.s.text)
            plain = dtype_of(kind) == WORDS[wanted].__name__
            return text if plain else f"{text}.view(np.{dtype_of(kind)})"
        special = SPECIAL.match(operand)
        if special:
            text = f"S.special[{operand!r}]"
            return text if size_of(kind) == 4 else f"{text}.astype(np.{dtype_of(kind)})"
        if operand in self.names:  # reserved shared memory
            return f"S.reserved({self.names[operand]!r}, np.{dtype_of(kind)})"
        if operand == "global_smem":
            return f"S.reserved('', np.{dtype_of(kind)})"
        if kind == "pred":
            return {"0": "S.none", "1": "S.all", "-1": "S.all"}[operand]
        return self.kernel.constant(immediate(operand, kind))

    def write(self, target: str, expression: str, kind: str) -> str:
        """Give a register the numbers of an expression of a type."""
        if target.strip() == "_":
            return "pass"
        place = self.names[target.strip()]
        size = self.kernel.registers[place]
        if kind != "pred":
            wanted = size_of(kind)
            if wanted < size:
                signed = "int" if kind[0] == "s" else "uint"
                expression = f"({expression}).astype(np.{signed}{8 * size})"
            if wanted < size or dtype_of(kind) != WORDS[size].__name__:
                expression = f"({expression}).view(np.{WORDS[size].__name__})"
        if self.condition:
            expression = f"where({self.condition}, {expression}, R[{place}])"
        return f"R[{place}] = {expression}"

    def listed(self, operand: str) -> list[str]:
        """The registers of an operand in braces."""
        return [x.strip() for x in operand.strip().strip("{}").split(",")]

    def address(self, operand: str, kind: str) -> str:
        """The address in brackets."""
        inner = operand.strip()[1:-1].strip()
        found = re.match(r"([%\w$]+)\s*(?:\+\s*(-?\w+))?$", inner)
        assert found is not None, operand
        base, offset = self.read(found[1], kind), int(found[2] or "0", 0)
        if offset == 0:
            return base
        return f"({base} + {self.kernel.constant(immediate(str(offset), kind))})"

    def each(self, form: str, kind: str | None = None, result: str | None = None) -> str:
        """d = form, with {0}, {1}, ... for the operands after it."""
        kind = kind or self.s.type
        target, *rest = self.s.operands
        operands = [self.read(x, kind) for x in rest]
        if self.s.has("ftz"):
            operands = [f"flush({x})" for x in operands]
        return self.write(target, form.format(*operands), result or kind)

    # Arithmetic.

    def op_mov(self) -> str | list[str]:
        target, source = self.s.operands
        kind = self.s.type
        if source.startswith("{"):
            parts = self.listed(source)
            part = f"b{8 * size_of(kind) // len(parts)}"
            return self.write(
                target, f"joined({', '.join(self.read(x, part) for x in parts)})", kind
            )
        if target.startswith("{"):
            parts = self.listed(target)
            part = f"b{8 * size_of(kind) // len(parts)}"
            value = self.read(source, kind)
            return [f"X = parted({value}, {len(parts)})"] + [
                self.write(x, f"X[{i}]", part) for i, x in enumerate(parts)
            ]
        value = self.read(source, kind)
        if not value.startswith(("R[", "S.")):
            value = f"S.everywhere({value})"
        return self.write(target, value, kind)

    def op_add(self) -> str:
        return self.flushed("{0} + {1}")

    def op_sub(self) -> str:
        return self.flushed("{0} - {1}")

    def flushed(self, form: str) -> str:
        """A result whose subnormal numbers are 0 if the instruction says so.

        In bfloat16 it is computed in float32 and rounded, which is exact for one operation.
        """
        kind = self.s.type
        if kind == "bf16":
            target, *rest = self.s.operands
            of_float32 = form.format(*(f"from_bf16({self.read(x, kind)})" for x in rest))
            return self.write(target, f"to_bf16({of_float32})", kind)
        if kind == "bf16x2":
            target, *rest = self.s.operands
            halves = [
                form.format(*(f"from_bf16(parted({self.read(x, kind)}, 2)[{i}])" for x in rest))
                for i in (0, 1)
            ]
            return self.write(target, f"joined({', '.join(f'to_bf16({x})' for x in halves)})", kind)
        return self.each(f"flush({form})" if self.s.has("ftz") else form)

    def op_mul(self) -> str:
        kind = self.s.type
        if kind in (*FLOATS, "bf16", "bf16x2"):
            return self.flushed("{0} * {1}")
        if self.s.has("wide"):
            wide = f"{kind[0]}{16 * size_of(kind)}"
            form = f"wide({{0}}, np.{dtype_of(wide)}) * wide({{1}}, np.{dtype_of(wide)})"
            return self.each(form, kind, wide)
        if self.s.has("hi"):
            wide = dtype_of(f"{kind[0]}64")
            form = f"((wide({{0}}, np.{wide}) * wide({{1}}, np.{wide})) >> 32)"
            return self.each(f"{form}.astype(np.{dtype_of(kind)})")
        return self.each("{0} * {1}")

    def op_mad(self) -> str:
        kind = self.s.type
        if self.s.has("wide"):
            wide = f"{kind[0]}{16 * size_of(kind)}"
            target, x, y, z = self.s.operands
            x, y = (f"wide({self.read(a, kind)}, np.{dtype_of(wide)})" for a in (x, y))
            return self.write(target, f"{x} * {y} + {self.read(z, wide)}", wide)
        return self.each("{0} * {1} + {2}")

    def op_fma(self) -> str:
        return self.flushed("fma({0}, {1}, {2})")

    def op_div(self) -> str:
        if self.s.type not in FLOATS:
            return self.each("quotient({0}, {1})")
        return self.flushed("{0} / {1}" if self.s.has("rn") else "divided({0}, {1})")

    def op_rem(self) -> str:
        return self.each("{0} - quotient({0}, {1}) * {1}")

    def op_min(self) -> str:
        return self.extreme("min")

    def op_max(self) -> str:
        return self.extreme("max")

    def extreme(self, which: str) -> str:
        """The smaller or the larger of two numbers; of a number and what is none, the number."""
        if self.s.type in FLOATS:
            return self.each(f"np.f{which}({{0}}, {{1}})")
        form = f"np.{which}imum({{0}}, {{1}})"
        return self.each(f"np.maximum({form}, 0)" if self.s.has("relu") else form)

    def op_neg(self) -> str:
        return self.each("-{0}")

    def op_abs(self) -> str:
        return self.each("np.abs({0})")

    def op_copysign(self) -> str:  # the sign of the first, the number of the second
        return self.each("np.copysign({1}, {0})")

    def op_ex2(self) -> str:
        return self.flushed("nearly(np.exp2, {0})")

    def op_lg2(self) -> str:
        return self.flushed("nearly(np.log2, {0})")

    def op_and(self) -> str:
        return self.each("{0} & {1}")

    def op_or(self) -> str:
        return self.each("{0} | {1}")

    def op_xor(self) -> str:
        return self.each("{0} ^ {1}")

    def op_not(self) -> str:
        return self.each("~{0}")

    def op_shl(self) -> str:
        target, x, count = self.s.operands
        value = f"shifted_left({self.read(x, self.s.type)}, {self.read(count, 'u32')})"
        return self.write(target, value, self.s.type)

    def op_shr(self) -> str:
        target, x, count = self.s.operands
        value = f"shifted_right({self.read(x, self.s.type)}, {self.read(count, 'u32')})"
        return self.write(target, value, self.s.type)

    def op_shf(self) -> str:
        target, low, high, count = self.s.operands
        value = f"funnel({', '.join(self.read(x, 'u32') for x in (low, high, count))}, "
        value += f"{self.s.has('l')}, {self.s.has('wrap')})"
        return self.write(target, value, "b32")

    def op_bfe(self) -> str:
        target, x, start, count = self.s.operands
        first, many = (self.read(y, "u32") for y in (start, count))
        return self.write(
            target, f"field({self.read(x, self.s.type)}, {first}, {many})", self.s.type
        )

    def op_prmt(self) -> str:
        target, x, y, how = self.s.operands
        value = ", ".join(self.read(z, "b32") for z in (x, y, how))
        return self.write(target, f"permuted({value})", "b32")

    def op_lop3(self) -> str:
        target, *rest, table = self.s.operands
        value = ", ".join(self.read(z, "b32") for z in rest)
        return self.write(target, f"looked_up({value}, {int(table, 0)})", "b32")

    def op_popc(self) -> str:
        return self.each("np.bitwise_count({0}).astype(np.uint32)", result="b32")

    def op_setp(self) -> str:
        target, *rest = self.s.operands
        if "|" in target:
            raise UnknownError(self.s.text)
        kind = self.s.type
        x, y = (self.read(z, kind) for z in rest[:2])
        compare = self.s.modifiers[0]
        if compare in COMPARE:
            value = f"({x} {COMPARE[compare]} {y})"
        elif compare in UNSIGNED:
            value = f"({x} {UNSIGNED[compare]} {y})"
        elif compare.endswith("u") and compare[:-1] in COMPARE:
            value = f"(({x} {COMPARE[compare[:-1]]} {y}) | np.isnan({x}) | np.isnan({y}))"
        else:
            raise UnknownError(self.s.text)
        if compare == "ne" and kind in FLOATS:  # is false of what is not a number
            value = f"({value} & ~(np.isnan({x}) | np.isnan({y})))"
        if len(rest) == 3:
            with_ = {"and": "&", "or": "|", "xor": "^"}[self.s.modifiers[1]]
            value = f"({value} {with_} {self.read(rest[2], 'pred')})"
        return self.write(target, value, "pred")

    def op_selp(self) -> str:
        target, x, y, p = self.s.operands
        kind = self.s.type
        value = f"where({self.read(p, 'pred')}, {self.read(x, kind)}, {self.read(y, kind)})"
        return self.write(target, value, kind)

    def op_cvt(self) -> str:
        to, of = self.s.types
        target, *rest = self.s.operands
        values = [self.read(x, of) for x in rest]
        if to == "bf16x2":
            high, low = (f"to_bf16({x})" for x in values)
            return self.write(target, f"joined({low}, {high})", to)
        if to == "f16x2":
            high, low = (f"to_f16({x}, {self.s.has('satfinite')})" for x in values)
            return self.write(target, f"joined({low}, {high})", to)
        (x,) = values
        if self.s.has("ftz"):
            x = f"flush({x})"
        if to == "bf16":
            return self.write(target, f"to_bf16({x})", "b16")
        if of == "bf16":
            return self.write(target, f"from_bf16({x})", to)
        turn = next((ROUNDINGS[m] for m in self.s.modifiers if m in ROUNDINGS), None)
        if to in FLOATS:
            if of in FLOATS and turn:
                return self.write(target, f"np.{turn}({x})", to)
            return self.write(target, f"wide({x}, np.{dtype_of(to)})", to)
        if of in FLOATS:
            return self.write(target, f"as_integer(np.{turn}({x}), np.{dtype_of(to)})", to)
        return self.write(target, f"{x}.astype(np.{dtype_of(to)})", to)

    # Memory.

    def op_ld(self) -> list[str]:
        target, source = self.s.operands
        kind = self.s.type
        if self.s.has("param"):
            name = source.strip("[] ")
            return [self.write(target, f"S.param({name!r}, np.{dtype_of(kind)})", kind)]
        space = self.s.modifiers[0]
        address = self.address(source, "u32" if space == "shared" else "u64")
        targets = self.listed(target)
        how = f"{size_of(kind)}, {len(targets)}, {self.s.has('nc')}"
        lines = [f"X = S.of_{space}.load({address}, {self.mask}, {how})"]
        return lines + [
            self.write(x, f"X[{i}].view(np.{dtype_of(kind)})", kind) for i, x in enumerate(targets)
        ]

    def op_st(self) -> str:
        target, source = self.s.operands
        kind = self.s.type
        space = self.s.modifiers[0]
        address = self.address(target, "u32" if space == "shared" else "u64")
        bits = f"b{8 * size_of(kind)}"
        values = ", ".join(self.read(x, bits) for x in self.listed(source))
        return f"S.of_{space}.store({address}, {self.mask}, {size_of(kind)}, [{values}])"

    def op_cp(self) -> str:
        if self.s.has("commit_group"):
            return f"S.commit({self.mask})"
        if self.s.has("wait_group"):
            return f"S.wait_copies({self.mask}, {int(self.s.operands[0], 0)})"
        if self.s.has("wait_all"):
            return f"S.commit({self.mask}); S.wait_copies({self.mask}, 0)"
        to, source, size, *given = self.s.operands
        address, origin = self.address(to, "u32"), self.address(source, "u64")
        count = self.read(given[0], "u32") if given else "None"
        return f"S.copy({address}, {origin}, {self.mask}, {int(size, 0)}, {count})"

    # What a warp does together.

    def op_shfl(self) -> str:
        target, x, lane, clamp, members = self.s.operands
        how = self.s.modifiers[1]
        if int(clamp, 0) != 31 or "|" in target:
            raise UnknownError(self.s.text)
        given = ", ".join((self.read(x, "b32"), self.read(lane, "u32"), self.read(members, "b32")))
        value = f"S.shuffled({self.mask}, {how!r}, {given})"
        return self.write(target, value, "b32")

    def op_redux(self) -> str:
        target, x, members = self.s.operands
        how = self.s.modifiers[1]
        given = f"{self.read(x, self.s.type)}, {self.read(members, 'b32')}"
        value = f"S.reduced({self.mask}, {how!r}, {given})"
        return self.write(target, value, self.s.type)

    def op_ldmatrix(self) -> list[str]:
        target, source = self.s.operands
        targets = self.listed(target)
        lines = [
            f"X = S.matrices({self.mask}, {self.address(source, 'u32')}, {len(targets)}, "
            f"{self.s.has('trans')})"
        ]
        return lines + [self.write(x, f"X[{i}]", "b32") for i, x in enumerate(targets)]

    def op_stmatrix(self) -> str:
        target, source = self.s.operands
        values = ", ".join(self.read(x, "b32") for x in self.listed(source))
        address = self.address(target, "u32")
        return f"S.store_matrices({self.mask}, {address}, [{values}], {self.s.has('trans')})"

    def op_mma(self) -> list[str]:
        kinds = self.s.types
        d, a, b, c = (self.listed(x) for x in self.s.operands)
        bits = [", ".join(self.read(x, "b32") for x in part) for part in (a, b)]
        total = ", ".join(self.read(x, "f32") for x in c)
        lines = [f"X = S.product({self.mask}, {kinds[1]!r}, [{bits[0]}], [{bits[1]}], [{total}])"]
        return lines + [self.write(x, f"X[{i}]", "f32") for i, x in enumerate(d)]

    def op_wgmma(self) -> list[str] | str:
        if self.s.has("fence"):
            return "pass"  # orders registers, which the driver's compiler looks after
        if self.s.has("commit_group"):
            return f"S.commit_products({self.mask})"
        if self.s.has("wait_group"):
            return f"S.wait_products({self.mask}, {int(self.s.operands[0], 0)})"
        shape = next(m for m in self.s.modifiers if re.match(r"m64n\d+k\d+", m))
        kind = self.s.type
        d, a, b, on, *signs = self.s.operands
        if [int(x) for x in signs[:2]] != [1, 1]:
            raise UnknownError(self.s.text)
        of_memory = not a.startswith("{")
        turns = [int(x) for x in signs[2:]]
        turns = turns if of_memory else [0, *turns]
        turns = [*turns, 0, 0][:2]
        first = (
            self.read(a, "b64")
            if of_memory
            else (f"[{', '.join(self.read(x, 'b32') for x in self.listed(a))}]")
        )
        targets = self.listed(d)
        total = ", ".join(self.read(x, "f32") for x in targets)
        lines = [
            f"X = S.warpgroup_product({self.mask}, {shape!r}, {kind!r}, {first}, "
            f"{self.read(b, 'b64')}, {turns}, [{total}], {self.read(on, 'pred')})"
        ]
        return lines + [self.write(x, f"X[{i}]", "f32") for i, x in enumerate(targets)]

    def op_fence(self) -> str:
        return f"S.fence({self.mask})"

    # Control.

    def op_griddepcontrol(self) -> str:
        return f"S.may_touch[{self.mask}] = True" if self.s.has("wait") else "pass"

    def op_bra(self) -> str:
        target = self.kernel.label(self.s.operands[0])
        if self.guard is None:
            return f"return {target}"
        return f"return where({self.guard}, {target}, {self.number + 1})"

    def op_ret(self) -> str:
        if self.guard is None:
            return f"return {END}"
        return f"return where({self.guard}, {END}, {self.number + 1})"

    op_exit = op_ret

    def op_bar(self) -> str:
        if self.s.has("warp"):
            return f"S.whole_warps({self.mask}, {self.read(self.s.operands[0], 'b32')})"
        if self.s.operands != ["0"] or self.guard:
            raise UnknownError(self.s.text)
        return "S.arrive(M)"


def immediate(text: str, kind: str) -> Any:
    """A number in an instruction, as a NumPy scalar of its type."""
    dtype = np.dtype(dtype_of(kind))
    if text[:2].lower() == "0f" and len(text) == 10:
        bits = np.array(int(text[2:], 16), np.uint32)
        return bits.view(np.float32)[()] if dtype == np.float32 else bits.astype(dtype)[()]
    if text[:2].lower() == "0d" and len(text) == 18:
        return np.array(int(text[2:], 16), np.uint64).view(np.float64)[()]
    number = int(text.rstrip("U"), 0)
    if dtype.kind == "f":
        raise UnknownError(text)
    size = 8 * dtype.itemsize
    return np.array(number % (1 << size), np.dtype(f"uint{size}")).view(dtype)[()]


def wide(x: Any, dtype: Any) -> Any:
    return x.astype(dtype)


def fma(x: Any, y: Any, z: Any) -> Any:
    return (x.astype(np.float64) * y + z).astype(np.float32)


def nearly(function: Any, x: Any) -> Any:
    """The nearest float32, or for half of all inputs one of its two neighbours.

    Approximate instructions err by about that much. What is exact stays exact, as 2 to a whole
    power is on a GPU.
    """
    exact = function(x.astype(np.float64))
    return blurred(exact.astype(np.float32), exact, x)


def divided(x: Any, y: Any) -> Any:
    exact = np.float64(x) / y
    return blurred(exact.astype(np.float32), exact, y)


def blurred(found: Any, exact: Any, x: Any) -> Any:
    step = (x.view(np.uint32) * np.uint32(2654435761)) >> np.uint32(30)
    beside = (found.view(np.int32) + np.array([-1, 0, 0, 1], np.int32)[step]).view(np.float32)
    kept = (found == exact) | ~np.isfinite(found) | ~np.isfinite(beside) | (found == 0)
    return np.where(kept, found, beside)


def flush(x: Any) -> Any:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, x * np.float32(0), x)


def quotient(x: Any, y: Any) -> Any:
    """x / y towards 0; what a division by 0 gives is not used."""
    y = np.where(y == 0, y.dtype.type(1), y)
    found = x // y  # rounded down
    return np.where((found < 0) & (found * y != x), found + x.dtype.type(1), found)


def as_integer(x: Any, dtype: Any) -> Any:
    limits = np.iinfo(dtype)
    inside = np.clip(np.nan_to_num(x.astype(np.float64)), float(limits.min), float(limits.max))
    return inside.astype(dtype)


def shifted_left(x: Any, count: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    safe = np.minimum(count, bits - 1).astype(x.dtype)
    return np.where(count < bits, x << safe, x.dtype.type(0))


def shifted_right(x: Any, count: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    found = x >> np.minimum(count, bits - 1).astype(x.dtype)
    return found if x.dtype.kind == "i" else np.where(count < bits, found, x.dtype.type(0))


def funnel(low: Any, high: Any, count: Any, left: bool, wrap: bool) -> Any:
    count = (count & 31 if wrap else np.minimum(count, 32)).astype(np.uint64)
    both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    if left:
        return ((both << count) >> np.uint64(32)).astype(np.uint32)
    return (both >> count).astype(np.uint32)


def field(x: Any, start: Any, count: Any) -> Any:
    """Bits start .. start + count of 32, with the sign of the last of them if x is signed."""
    start, count = (np.broadcast_to(y & 255, x.shape).astype(np.int64) for y in (start, count))
    found = x.astype(np.int64) >> np.minimum(start, 63)
    unused = 64 - np.clip(count, 1, 63)
    if x.dtype.kind == "u":
        found, unused = found.astype(np.uint64), unused.astype(np.uint64)
    return np.where(count > 0, (found << unused) >> unused, 0).astype(x.dtype)


def permuted(x: Any, y: Any, how: Any) -> Any:
    both = (y.astype(np.uint64) << np.uint64(32)) | x.astype(np.uint64)
    found = np.uint32(0)
    for i in range(4):
        selector = (how >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((selector & np.uint32(7)) * np.uint32(8)).astype(np.uint64)) & np.uint64(
            255
        )
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(selector & np.uint32(8), sign, byte).astype(np.uint32)
        found = found | (byte << np.uint32(8 * i))
    return found


def looked_up(x: Any, y: Any, z: Any, table: int) -> Any:
    found = np.uint32(0)
    for i in range(8):
        if table >> i & 1:
            one = x if i & 4 else ~x
            found = found | (one & (y if i & 2 else ~y) & (z if i & 1 else ~z))
    return found


def joined(*parts: Any) -> Any:
    """Numbers side by side in one, the lowest first."""
    size = parts[0].dtype.itemsize
    target = WORDS[size * len(parts)]
    found = target(0)
    for i, x in enumerate(parts):
        found = found | (x.view(WORDS[size]).astype(target) << target(8 * size * i))
    return found


def parted(x: Any, count: int) -> list[Any]:
    size = x.dtype.itemsize // count
    target = x.dtype.type
    return [(x >> target(8 * size * i)).astype(WORDS[size]) for i in range(count)]


def to_bf16(x: Any) -> Any:
    bits = x.view(np.uint32)
    found = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), found).astype(np.uint16)


def from_bf16(x: Any) -> Any:
    return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16(x: Any, clipped: bool) -> Any:
    if clipped:
        x = np.clip(x, -65504.0, 65504.0)
    return x.astype(np.float16).view(np.uint16)


FUNCTIONS = {
    f.__name__: f
    for f in (
        *(
            wide,
            fma,
            nearly,
            divided,
            flush,
            quotient,
            as_integer,
            shifted_left,
            shifted_right,
            funnel,
        ),
        *(field, permuted, looked_up, joined, parted, to_bf16, from_bf16, to_f16),
    )
}
