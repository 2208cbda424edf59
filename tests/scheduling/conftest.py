from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine is no failure of the rules.
settings.register_profile("rules", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rules")
