"""`hf-memeff demo`: fine-tune a small real model, reload the adapter in stock PEFT, measure what it cost."""
