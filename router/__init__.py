"""The router: sessions stay where their prefix is, dead engines are known, every cache miss has a cause.

``service`` is the facade; ``engines`` speaks SGLang's HTTP surface (``wire`` writes what is asked, ``replies`` and
``streams`` read what comes back), ``table`` and ``placement`` decide, ``fleet`` and ``health`` watch,
``cache_ledger`` explains.
"""
