"""GLUE by fine-tuning a pretrained model, with and without a positional method: Table 3."""
