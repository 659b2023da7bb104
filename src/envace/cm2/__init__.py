"""CM2 data (tool dialogues, for RL with checklists) -> tasks and demonstrations."""
