"""A causal language model with TISA + RoPE, trained with Trainer on a few lines, then asked."""

import torch
from transformers import Trainer, TrainingArguments

from whence.models import WhenceConfig, WhenceForCausalLM

TEXT = "Attention counts the lag from the query; the key is where the lag ends. " * 40
LENGTH = 64

torch.manual_seed(0)
letters = sorted(set(TEXT))
ids = torch.tensor([letters.index(letter) for letter in TEXT])
blocks = [{"input_ids": block, "labels": block} for block in ids.unfold(0, LENGTH, 16)]

config = WhenceConfig(
    position="tisa:kernels=5+rope",
    vocab_size=len(letters),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = WhenceForCausalLM(config)
arguments = TrainingArguments(
    output_dir="out/causal_lm_tisa_rope",
    max_steps=150,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    report_to="none",
    save_strategy="no",
    dataloader_pin_memory=torch.cuda.is_available(),
    disable_tqdm=True,
)
result = Trainer(model, arguments, train_dataset=blocks).train()
print(f"loss {result.training_loss:.2f}")

prompt = torch.tensor([[letters.index(letter) for letter in "Attention counts"]]).to(model.device)
answer = model.generate(prompt, max_new_tokens=48, do_sample=False, pad_token_id=0)
print("".join(letters[i] for i in answer[0].tolist()))
