"""The benchmark's protocol: settings, methods, an equal search for each, fresh seeds, results as data, ranks."""
