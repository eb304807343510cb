"""The embedded engine: SGLang's HTTP surface over a small Qwen3-shaped decoder on the CPU.

``config`` is the section of the configuration tree, ``server.run`` the process. Reading order of one call:
``http`` -> ``protocol`` -> ``scheduler`` -> ``prefill`` / ``decode`` -> ``model`` -> ``replies``. Only this
package's modules below ``config`` import torch. The HTTP surface is documented in PROTOCOL-compatible terms:
where SGLang and this engine could differ, this engine does what a stock server does.
"""
