"""`hotbed serve` under load: requests on a schedule, a table larger than memory, updates and malformed requests on the way."""
