package pgtest

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The installation is a stand-in, so that a failure damages none. Package managers put links into it.
func TestPrivateWithExtensions_WhatATestChangesStaysInItsOwnFolder(t *testing.T) {
	t.Parallel()
	prefix, cellar := t.TempDir(), t.TempDir()
	for _, name := range []string{"bin/initdb", "bin/pg_ctl", "bin/postgres", "lib/libpq.so", "share/postgresql/postgres.bki",
		"share/postgresql/tsearch_data/german.stop", "share/postgresql/extension/pgratelimit.control"} {
		writeFile(t, filepath.Join(prefix, name))
	}
	writeFile(t, filepath.Join(cellar, "linked.control"))
	require.NoError(t, os.Symlink(filepath.Join(cellar, "linked.control"), filepath.Join(prefix, "share/postgresql/extension/linked.control")))
	before := filesOf(t, prefix, cellar)

	bin, extensions, err := copyPrograms(t, filepath.Join(prefix, "bin"))
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(bin, "postgres"))
	require.FileExists(t, filepath.Join(bin, "../lib/libpq.so"))
	changed := 0
	require.NoError(t, filepath.WalkDir(filepath.Dir(extensions), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		changed++
		return os.WriteFile(path, []byte("default_version = '9.0.0'"), 0o600)
	}))
	require.Equal(t, 4, changed)
	for name, file := range filesOf(t, prefix, cellar) {
		require.Equal(t, before[name], file, name)
	}
}

func writeFile(t *testing.T, path string) {
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(path), 0o600))
}

// filesOf returns the files of directories with their sizes, times and texts.
func filesOf(t *testing.T, dirs ...string) map[string]string {
	files := map[string]string{}
	for _, dir := range dirs {
		require.NoError(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			info, err := entry.Info()
			require.NoError(t, err)
			text, err := os.ReadFile(path)
			files[path] = fmt.Sprint(info.Mode(), info.Size(), info.ModTime(), string(text))
			return err
		}))
	}
	return files
}
