// Package client_test tests the Go client on a server: what its calls do there, in each mode of pgx, and what it leaves behind.
package client_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// A program that imports the client, its middleware and the fake compiles pgx and nothing else. Tests of the client add testify
// to the graph of its modules, as those of pgx do.
func TestImporter_GetsPgxAndNothingElse(t *testing.T) {
	t.Parallel()
	repository := kit.NoError(filepath.Abs("../.."))(t)
	sums := kit.NoError(os.ReadFile(filepath.Join(repository, "go.sum")))(t)
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module program\n\ngo 1.26\n\nrequire github.com/pgratelimit/pgratelimit v0.0.0\n\n" +
			"replace github.com/pgratelimit/pgratelimit => " + repository + "\n",
		"go.sum": string(sums),
		"main.go": `package main

import (
	_ "github.com/pgratelimit/pgratelimit/client"
	_ "github.com/pgratelimit/pgratelimit/client/clienttest"
	_ "github.com/pgratelimit/pgratelimit/client/httplimit"
)

func main() {}
`,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	run := func(args ...string) string {
		command := exec.CommandContext(t.Context(), "go", args...)
		command.Dir = dir
		command.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
		out := kit.NoError(command.Output())(t)
		return string(out)
	}
	compiled := strings.Fields(run("list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "."))
	slices.Sort(compiled)
	require.Equal(t, []string{
		"github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile", "github.com/jackc/pgx/v5", "github.com/pgratelimit/pgratelimit", "golang.org/x/text", "program",
	}, slices.Compact(compiled))

	var wants []string // of this module
	for line := range strings.Lines(run("mod", "graph")) {
		if edge := strings.Fields(line); strings.HasPrefix(edge[0], "github.com/pgratelimit/") {
			path, _, _ := strings.Cut(edge[1], "@")
			wants = append(wants, path)
		}
	}
	require.ElementsMatch(t, []string{
		"go", "github.com/jackc/pgx/v5", "github.com/stretchr/testify",
		"github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile", "github.com/jackc/puddle/v2", "golang.org/x/sync", "golang.org/x/text", // of pgx
		"go.yaml.in/yaml/v3", // of testify
	}, wants)
}
