"""How long a step of the engine takes: one protocol, one file per model of the hardware."""
