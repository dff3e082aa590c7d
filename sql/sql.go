// Package sql has the files of this directory, for package migrations.
package sql

import "embed"

// Files are those that install.sql lists, and install.sql.
//
//go:embed *.sql
var Files embed.FS
