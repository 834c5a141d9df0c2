"""kvconnector: a vLLM KV connector over Mooncake Store, driven by the decisions of kvcore."""
