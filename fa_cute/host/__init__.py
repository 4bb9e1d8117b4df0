"""What the host decides before a launch: the problem, its plan, its configuration, its kernel."""
