"""An endpoint that plays a task's gold actions (oracle) or does nothing (null), to prove a harness's integration."""
