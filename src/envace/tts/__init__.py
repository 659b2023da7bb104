"""Private rehearsal at test time compared: modes, numbers of rehearsals, and who rehearses."""
