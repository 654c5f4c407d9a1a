"""Training steps and exchanges on links of a limited rate, between network namespaces of one machine."""
