"""A model on several ranks: processes that each compute a part of it, in step."""
