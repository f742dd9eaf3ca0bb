"""LoRA on BERT's projections and TISA beside its position embeddings, trained together by PEFT.

python examples/bert_tisa_lora.py                      a tiny BERT, made-up data
python examples/bert_tisa_lora.py bert-base-uncased    your model
"""

import sys

import peft
import torch
import transformers as hf

import whence.hf


def made(n: int) -> list[dict[str, list[int] | int]]:
    """Does token 2 stand right before token 3? That is a matter of one lag."""
    rows = []
    for label in torch.randint(2, (n,)).tolist():
        row = (torch.randperm(12) + 4).tolist()
        at = int(torch.randint(11, ()))
        row[at : at + 2] = [2, 3] if label else [3, 2]
        rows.append({"input_ids": row, "labels": label})
    return rows


hf.set_seed(0)
if len(sys.argv) == 2:
    model = hf.AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
else:
    size = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=16, hidden_size=64, **size))

whence.hf.attach(model, "tisa:kernels=5")  # first the method, which changes nothing yet
config = peft.LoraConfig(
    task_type="SEQ_CLS",  # trains the classifier too
    r=8,
    target_modules=["query", "value"],
    modules_to_save=["whence"],  # without this PEFT freezes TISA, and says nothing
)
adapted = peft.get_peft_model(model, config)
adapted.print_trainable_parameters()
options = hf.TrainingArguments("out", num_train_epochs=2, learning_rate=3e-3, report_to="none")
trainer = hf.Trainer(adapted, options, train_dataset=made(4096))
print(f"mean loss {trainer.train().training_loss:.3f}")
print(f"largest amplitude {whence.hf.attached(adapted).methods[0].amplitude.abs().max():.2f}")

adapted.save_pretrained("out/lora")  # the adapter: LoRA, classifier and TISA
merged = adapted.merge_and_unload()  # a model with TISA attached, without PEFT
merged.save_pretrained("out/bert-tisa-lora")
