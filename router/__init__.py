"""The router: sessions stay where their prefix is, dead engines are known, every cache miss has a cause.

``service`` is the facade; ``engines`` speaks SGLang's HTTP surface (``wire`` has its bytes), ``table`` and
``placement`` decide, ``fleet`` and ``health`` watch, ``cache_ledger`` explains.
"""
