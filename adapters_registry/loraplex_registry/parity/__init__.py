"""The parity gate: a version is ready once an engine has answered with it as its files say, or no engine could."""
