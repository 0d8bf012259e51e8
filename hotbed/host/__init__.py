"""What the machine gives: memory and pages, threads, compiled-code caches, durable files, interrupts."""
