"""Penstock's colder tiers inside other engines. Imports storage only; owns no model and no scheduler."""
