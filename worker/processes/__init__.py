"""Child processes: their progress, their output, and the limit of their memory."""
