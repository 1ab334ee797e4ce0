"""Which roles a config has engines for, and how many processes they need. Imports no jax: the launcher asks it first."""

MODES = ("disaggregated", "interleaved")


def of(config):
    """The roles that have engines of their own in this mode. Raises ValueError for an unknown mode or a bad count."""
    if config.mode not in MODES:
        raise ValueError(f"config.mode must be one of {', '.join(MODES)}, got {config.mode!r}")
    names = ("decode",) if config.mode == "interleaved" else ("prefill", "decode")
    for name in names:
        role = config[name]
        for field in ("engines", "processes"):
            if role[field] < 1:
                raise ValueError(f"config.{name}.{field} must be at least 1, got {role[field]}")
        if role.tp is not None and (role.tp < 1 or role.tp % role.processes):
            raise ValueError(f"config.{name}.tp ({role.tp}) must be a multiple of config.{name}.processes "
                             f"({role.processes})")
    return names


def local_processes(config):
    """(processes, CPU devices a process) that a run of this config on one machine needs."""
    used = [config[name] for name in of(config)]
    return (sum(r.engines * r.processes for r in used),
            max((r.tp or r.processes) // r.processes for r in used))
