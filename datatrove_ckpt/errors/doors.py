"""What jobs that version 0.2.0 queued hold beside their settings."""


class Door: ...
