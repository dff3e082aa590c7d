// Package sql has the files of this directory, for package migrations.
package sql

import (
	"embed"
	"strings"
)

// Files are those that install.sql lists, and install.sql.
//
//go:embed *.sql
var Files embed.FS

// Version returns the release, as ratelimit_version() does.
func Version() string {
	text, _ := Files.ReadFile("version.sql") // which is embedded
	_, version, _ := strings.Cut(string(text), "select '")
	version, _, _ = strings.Cut(version, "'")
	return version
}
