"""Ask servers over HTTP: repetitions, deadlines, and a breaker for servers that do not answer."""
