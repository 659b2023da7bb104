"""EnvACE: one policy acts and rehearses its own environment. Plain PyTorch, no RL framework."""
