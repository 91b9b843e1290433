"""Formats of strings that are stricter here than in llguidance, as patterns of the whole string.

February has 29 days in leap years only; there are no leap seconds, whose place depends on the time
zone; a host name has no label in punycode, which a regular expression cannot check, and fits 253
characters. Each accepts less than the standard (RFC 3339, RFC 1123), nothing more.
"""

from collections.abc import Mapping
from types import MappingProxyType

MAX_HOSTNAME = 253

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
# One to 63 characters, of which the third and the fourth are not both hyphens.
_LABEL = (
    "[A-Za-z0-9](?:[A-Za-z0-9]|[A-Za-z0-9-]{1,2}[A-Za-z0-9]"
    "|[A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{0,58}[A-Za-z0-9])?"
)

PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "date": f"^{_DATE}$",
        "time": f"^{_TIME}$",
        "date-time": f"^{_DATE}[tT]{_TIME}$",
        "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    }
)
OTHERS = frozenset({"duration", "email", "ipv4", "ipv6", "uuid", "uri"})  # as llguidance has them
