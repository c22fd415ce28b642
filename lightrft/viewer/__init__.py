"""What a person looks at: reports and pages over run folders."""
