"""Child processes: their progress, output and limits; settings and memory of this process."""
