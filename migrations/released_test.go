package migrations

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Databases have run what is released: it stays as it is, and nothing joins it.
func TestReleased_NeverChanges(t *testing.T) {
	t.Parallel()
	require.Empty(t, changed(t, os.DirFS(".")))
}

func TestReleased_AChangeIsSeen(t *testing.T) {
	t.Parallel()
	write := func(dir, name, text string) {
		require.NoError(t, os.MkdirAll(path.Dir(dir+"/"+name), 0o755))
		require.NoError(t, os.WriteFile(dir+"/"+name, []byte(text), 0o644))
	}
	sum := func(text string) string {
		hash := sha256.Sum256([]byte(text))
		return hex.EncodeToString(hash[:])
	}
	for want, change := range map[string]func(dir string){
		"":                           func(string) {},
		"snapshots/001/a.sql is new": func(dir string) { write(dir, "snapshots/001/a.sql", "x") },
		"snapshots/001/include/b.sql was changed": func(dir string) { write(dir, "snapshots/001/include/b.sql", "x") },
		"001_install.sql is missing":              func(dir string) { require.NoError(t, os.Remove(dir+"/001_install.sql")) },
	} {
		dir := t.TempDir()
		write(dir, "001_install.sql", "one")
		write(dir, "snapshots/001/include/b.sql", "two")
		write(dir, "snapshots/002/c.sql", "unreleased")
		write(dir, "released.sha256", sum("one")+"  001_install.sql\n"+sum("two")+"  snapshots/001/include/b.sql\n")
		change(dir)
		require.Equal(t, want, strings.Join(changed(t, os.DirFS(dir)), ", "))
	}
}

// changed says what differs from released.sha256, which is as sha256sum writes it.
func changed(t *testing.T, migrations fs.FS) (differences []string) {
	t.Helper()
	list, err := fs.ReadFile(migrations, "released.sha256")
	require.NoError(t, err)
	released := map[string]bool{}
	for lines := bufio.NewScanner(strings.NewReader(string(list))); lines.Scan(); {
		sum, name, ok := strings.Cut(lines.Text(), "  ")
		require.True(t, ok, lines.Text())
		released[name] = true
		switch text, err := fs.ReadFile(migrations, name); {
		case err != nil:
			differences = append(differences, name+" is missing")
		default:
			if hash := sha256.Sum256(text); hex.EncodeToString(hash[:]) != sum {
				differences = append(differences, name+" was changed")
			}
		}
	}
	frozen := map[string]bool{} // snapshots of which a file is released
	for name := range released {
		if parts := strings.Split(name, "/"); parts[0] == "snapshots" {
			frozen[path.Join(parts[:2]...)] = true
		}
	}
	for snapshot := range frozen {
		require.NoError(t, fs.WalkDir(migrations, snapshot, func(name string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() && !released[name] {
				differences = append(differences, name+" is new")
			}
			return err
		}))
	}
	return differences
}
