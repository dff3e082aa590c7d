package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDigest(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		events, want string
		failed       int
	}{
		"nothing": {want: "0 passed, 0 failed, 0 skipped"},
		"a test counts by its subtests": {
			events: `
				{"Action":"run","Package":"p","Test":"A"}
				{"Action":"run","Package":"p","Test":"A/x"}
				{"Action":"pass","Package":"p","Test":"A/x"}
				{"Action":"run","Package":"p","Test":"A/y"}
				{"Action":"output","Package":"p","Test":"A/y","Output":"=== RUN   A/y\n"}
				{"Action":"output","Package":"p","Test":"A/y","Output":"    a_test.go:1: too cold\n"}
				{"Action":"skip","Package":"p","Test":"A/y"}
				{"Action":"pass","Package":"p","Test":"A"}
				{"Action":"pass","Package":"p","Elapsed":1.5}`,
			want: "pass p 1.5s\nskipped A/y: a_test.go:1: too cold\n1 passed, 0 failed, 1 skipped",
		},
		"a failure is counted once and its output shown": {
			events: `
				{"Action":"run","Package":"p","Test":"A"}
				{"Action":"run","Package":"p","Test":"A/x"}
				{"Action":"output","Package":"p","Test":"A/x","Output":"wrong\n"}
				{"Action":"fail","Package":"p","Test":"A/x"}
				{"Action":"fail","Package":"p","Test":"A"}
				{"Action":"fail","Package":"p"}`,
			want:   "wrong\nfail p 0s\nfailed A/x (p)\n0 passed, 1 failed, 0 skipped",
			failed: 1,
		},
		"a failure after good subtests": {
			events: `
				{"Action":"run","Package":"p","Test":"A"}
				{"Action":"run","Package":"p","Test":"A/x"}
				{"Action":"pass","Package":"p","Test":"A/x"}
				{"Action":"fail","Package":"p","Test":"A"}
				{"Action":"fail","Package":"p"}`,
			want:   "fail p 0s\nfailed A (p)\n1 passed, 1 failed, 0 skipped",
			failed: 1,
		},
		"a test that does not finish": {
			events: `
				{"Action":"run","Package":"p","Test":"A"}
				{"Action":"run","Package":"p","Test":"B"}
				{"Action":"pass","Package":"p","Test":"B"}
				{"Action":"output","Package":"p","Test":"B","Output":"panic: test timed out\n"}
				{"Action":"fail","Package":"p"}`,
			want:   "panic: test timed out\nfail p 0s\nfailed A (p): it did not finish\nfailed p\n1 passed, 2 failed, 0 skipped",
			failed: 2,
		},
		"a package that does not build": {
			events: `
				{"Action":"build-output","ImportPath":"p [p.test]","Output":"undefined: x\n"}
				{"Action":"build-fail","ImportPath":"p [p.test]"}
				{"Action":"fail","Package":"p"}`,
			want:   "undefined: x\nfail p 0s\nfailed p\n0 passed, 1 failed, 0 skipped",
			failed: 1,
		},
		"a package without tests": {
			events: `{"Action":"skip","Package":"p"}`,
			want:   "0 passed, 0 failed, 0 skipped",
		},
		"what is not an event": {
			events: "go: no such module",
			want:   "go: no such module\n0 passed, 0 failed, 0 skipped",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			failed, err := run(strings.NewReader(strings.TrimSpace(strings.ReplaceAll(c.events, "\t", ""))), &out, "")
			require.NoError(t, err)
			require.Equal(t, c.want, strings.TrimSpace(out.String()))
			require.Equal(t, c.failed, failed)
		})
	}
}

func TestDigest_NamesTheServers(t *testing.T) {
	t.Parallel()
	log := filepath.Join(t.TempDir(), "servers.log")
	require.NoError(t, os.WriteFile(log, []byte("b.test: local PostgreSQL 15\na.test: local PostgreSQL 15\na.test: local PostgreSQL 15\n"), 0o600))

	var out strings.Builder
	_, err := run(strings.NewReader(""), &out, log)
	require.NoError(t, err)
	require.Equal(t, "server local PostgreSQL 15 (a.test, b.test)\n0 passed, 0 failed, 0 skipped\n", out.String())
}
