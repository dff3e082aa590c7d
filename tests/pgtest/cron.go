package pgtest

import (
	"os"
	"path/filepath"
	"strings"
)

// CronScript returns a script of pg_cron/ for a client other than psql, without its line for psql.
func CronScript(name string) (string, error) {
	root, err := findRoot()
	if err != nil {
		return "", err
	}
	script, err := os.ReadFile(filepath.Join(root, "pg_cron", name))
	return strings.Replace(string(script), "\\set ON_ERROR_STOP on\n", "", 1), err
}
