"""Language models by their layers: what they keep per token and per sequence, what they weigh, what they compute."""
