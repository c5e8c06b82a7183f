"""Model families, one file each, from config to logits; `registry` knows them by model_type."""
