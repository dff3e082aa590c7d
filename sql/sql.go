// Package sql has the files of this directory, for package migrations.
package sql

import (
	"embed"
	"regexp"
)

// Files are those that install.sql lists, and install.sql.
//
//go:embed *.sql
var Files embed.FS

//go:embed version.sql
var version string

// Version is the release, as ratelimit_version() says it.
var Version = regexp.MustCompile(`select '(.*)'`).FindStringSubmatch(version)[1]
