"""Measurements of the engine without a server: workloads, driving, reports. Owns no engine parts."""
