"""Add TISA to BERT and fine-tune both with Trainer.

python examples/bert_tisa_trainer.py                               a tiny BERT, made-up data
python examples/bert_tisa_trainer.py bert-base-uncased train.tsv   your model, SST-2's format
"""

import csv
import sys

import torch
import transformers as hf

import whence.hf


def made(n: int) -> list[dict[str, list[int] | int]]:
    """Does token 2 come before token 3? Nobody can tell without positions."""
    rows = [(torch.randperm(14) + 2).tolist() for _ in range(n)]
    return [{"input_ids": row, "labels": int(row.index(2) < row.index(3))} for row in rows]


hf.set_seed(0)
if len(sys.argv) == 3:
    tokenizer, rate = hf.AutoTokenizer.from_pretrained(sys.argv[1]), 2e-5
    with open(sys.argv[2], encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    data = [tokenizer(r["sentence"], truncation=True) | {"labels": int(r["label"])} for r in rows]
    model = hf.AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
else:
    tokenizer, rate, data = None, 1e-3, made(2048)
    size = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=16, hidden_size=64, **size))
print(whence.hf.attach(model, "tisa:kernels=5", keep_positions=False))  # in place of the table
adamw = torch.optim.AdamW(whence.hf.parameter_groups(model, rate))  # the kernels at 1.5e-3
options = hf.TrainingArguments("out", num_train_epochs=2, report_to="none")
given = {"processing_class": tokenizer, "optimizers": (adamw, None)}
trainer = hf.Trainer(model, options, train_dataset=data, **given)
print(f"mean loss {trainer.train().training_loss:.3f}")
trainer.save_model("out/bert-tisa")  # AutoModel loads it again, after `import whence`
