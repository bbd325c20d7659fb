"""Places for blocks that are colder than the device, and the traffic between them and the device."""
