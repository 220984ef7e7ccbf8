"""What people read: tables, sentences, progress, HTML pages."""
