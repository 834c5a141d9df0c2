"""vLLM's OpenAI-compatible server in its own process, on loopback, and the client that tests need of it."""

import json
import sys
import time
import urllib.error
import urllib.request

from connector.testbed.processes import Process, free_port


class Server:
    """Serves a tiny model; prompts and answers are token ids. `transfer`: vLLM's kv_transfer_config, or None."""

    def __init__(self, model, log, env=None, transfer=None, arguments=()):
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--host=127.0.0.1"]
        command += [f"--port={self.url.rpartition(':')[2]}", "--served-model-name=tiny", "--skip-tokenizer-init"]
        command += ["--enforce-eager", "--dtype=float32", "--block-size=32", "--max-model-len=2048"]
        command += [f"--kv-cache-memory-bytes={64 << 20}", "--enable-prompt-tokens-details", *arguments]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        # EngineCore is a process of its own, as it is in production.
        self.process = Process(command, log, {**(env or {}), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})

    def ready(self, timeout_s=300):
        """Wait until it answers; several may start at the same time before this."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("health")
                return self
            except OSError:
                if self.process.child.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server is not up\n{self.process.log_tail()}") from None
                time.sleep(0.1)

    def get(self, path):
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=10) as answer:
            return answer.read().decode()

    def complete(self, prompt, max_tokens=16, rank=None, timeout_s=60):
        """(greedy tokens after the prompt, tokens of the prompt that were cached); `rank`: of data parallel ones."""
        asked = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"Content-Type": "application/json"} | ({} if rank is None else {"X-data-parallel-rank": str(rank)})
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(asked).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error}: {error.read().decode()}\n{self.process.log_tail()}") from None
        details = said["usage"]["prompt_tokens_details"]
        return said["choices"][0]["token_ids"], details["cached_tokens"] if details else 0

    def kill(self):
        self.process.kill()
