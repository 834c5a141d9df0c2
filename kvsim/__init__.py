"""kvsim: a discrete-event simulator that plans capacity with the decisions of kvcore."""
