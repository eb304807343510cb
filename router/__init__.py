"""The router: sessions stay where their prefix is, dead engines are known, every cache miss has a cause.

``service`` is the facade: ``seats`` finds the place of a call (``table``, ``placement``, ``admission`` decide),
``calls`` runs it, ``accounts`` and ``cache_ledger`` explain its misses, ``fleet`` and ``health`` watch engines.
``engines`` speaks SGLang's HTTP surface (``wire`` and ``buckets`` write what is sent, ``replies`` and ``streams`` read
what comes).
"""
