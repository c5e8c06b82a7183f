"""Model families, one file each, from config to logits. `registry` maps model_type to family."""
