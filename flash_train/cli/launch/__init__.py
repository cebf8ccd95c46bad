"""How runs are started and how they end: launchers, multiruns, run directories, signals and exit statuses."""
