package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Shards from nothing, by the commands that a user runs.
func TestShards(t *testing.T) { // not parallel: it sets the environment
	db := pgtest.Empty(t)
	r := on(t, db, "install", "--shards", "4")
	require.Equal(t, exitDone, r.code, r.errors)
	t.Cleanup(func() {
		for n := range 4 {
			db.Exec(t, fmt.Sprintf("drop database if exists %s with (force)", pgx.Identifier{fmt.Sprintf("%s_%d", db.Name, n)}.Sanitize()))
		}
	})
	require.Contains(t, r.out, "shard 3 of 4: pgratelimit 0.3.0 is installed in schema public; its schema version is 1.\n")
	list := regexp.MustCompile(`SHARD_URLS="(.*)"`).FindStringSubmatch(r.out)
	require.NotNil(t, list, r.out)
	require.Equal(t, r, on(t, db, "install", "--shards", "4"), "once more")

	t.Setenv("DATABASE_URL", "")
	t.Setenv("SHARD_URLS", list[1])
	require.Equal(t, exitDone, command(t, "install").code)
	urls := strings.Fields(list[1])
	keys := make([]string, 4)
	for n := range keys {
		keys[n] = kit.KeyOf(n, 4, "user:")
	}

	file := filepath.Join(t.TempDir(), "limits.yaml")
	limits := "policies:\n  api: {capacity: 10, refill: 0, every: 1d}\noverrides:\n  api:\n    " + keys[2] + ": {capacity: 20}\n"
	limits = strings.Replace(limits, keys[2], `"`+keys[2]+`"`, 1)
	require.NoError(t, os.WriteFile(file, []byte(limits), 0o600))
	r = command(t, "apply", file, "--dry-run")
	require.Equal(t, exitNo, r.code, r.errors)
	require.Equal(t, 4, strings.Count(r.out, `+ policy "api"`))
	require.Equal(t, 1, strings.Count(r.out, "+ override"), r.out)
	require.Regexp(t, `(?s)shard 2 of 4: \n\+ policy[^\n]*\n\+ override`, r.out)
	require.Equal(t, exitDone, command(t, "apply", file).code)
	r = command(t, "apply", file)
	require.Equal(t, exitDone, r.code)
	require.Equal(t, 4, strings.Count(r.out, "The database is as the file says."))
	require.Equal(t, exitDone, command(t, "override", "api", keys[0], "--capacity", "7").code)
	r = command(t, "apply", file, "--dry-run")
	require.Equal(t, exitNo, r.code, "a difference of any shard is one, also if those after it have none")
	require.Equal(t, 3, strings.Count(r.out, "The database is as the file says."))
	require.Equal(t, exitDone, command(t, "override", "api", keys[0], "--remove").code)

	for n, key := range keys {
		left := 9
		if n == 2 {
			left = 19
		}
		require.Equal(t, exitDone, command(t, "acquire", "api", key).code)
		require.Contains(t, command(t, "peek", "api", key).out, fmt.Sprintf("allowed: %d of ", left))
		for _, args := range [][]string{{"peek", "api", key}, {"status"}, {"doctor"}, {"apply", file}} {
			r = command(t, append(args, "--database-url", urls[n])...)
			require.Equal(t, exitError, r.code, args)
			require.Contains(t, r.errors, fmt.Sprintf("is shard %d of 4", n), args)
			require.Contains(t, r.errors, "List all 4 databases, in SHARD_URLS", args)
			require.Empty(t, r.out)
		}
	}
	r = command(t, "acquire", "api", keys[1], "--cost", "5")
	require.Equal(t, exitDone, r.code)
	r = command(t, "status", "--max-rows", "2")
	require.Regexp(t, `^POLICY .*\napi +`+keys[1]+` +4 .*\napi +user:\d+ +9 .*\n$`, r.out)
	require.Equal(t, exitDone, command(t, "override", "api", keys[3], "--capacity", "7").code)
	require.Equal(t, exitDone, command(t, "reset", "api", "--all").code)
	require.Contains(t, command(t, "peek", "api", keys[3]).out, "allowed: 7 of 7 ")
	require.Contains(t, command(t, "peek", "api", keys[0]).out, "allowed: 10 of 10 ")
	require.Equal(t, 2, strings.Count(command(t, "policies").out, "\n"), "the policies of all shards, once")
	r = command(t, "export")
	require.Contains(t, r.out, fmt.Sprintf("%q: {capacity: 20, ", keys[2]))
	require.Contains(t, r.out, fmt.Sprintf("%q: {capacity: 7, ", keys[3]))
	for n, key := range keys {
		db := &pgtest.DB{URL: urls[n]}
		_, err := db.Connect(t).Exec(t.Context(), "select ratelimit_define_policy('jobs', 5, lease => '1 hour'), ratelimit_hold('jobs', $1, 'h')", key)
		require.NoError(t, err)
	}
	require.Equal(t, 5, strings.Count(command(t, "holders").out, "\n"))
	require.Regexp(t, `^POLICY .*\njobs +`+keys[1]+` .*\n$`, command(t, "holders", "jobs", keys[1]).out)
	r = command(t, "doctor")
	require.Equal(t, r.code == exitDone, r.out == "All is well.\n", r.out)

	t.Setenv("SHARD_URLS", strings.Join([]string{urls[0], urls[2], urls[1], urls[3]}, " "))
	for _, args := range [][]string{{"status"}, {"doctor"}, {"apply", file}, {"acquire", "api", keys[1]}, {"install"}} {
		r = command(t, args...)
		require.Equal(t, exitError, r.code, args)
		require.Contains(t, r.errors, "shard 1 of 4", args)
		require.Contains(t, r.errors, "shard 2 of 4", args)
	}
	t.Setenv("SHARD_URLS", list[1])
	require.Equal(t, 4, strings.Count(command(t, "uninstall").out, "pgratelimit is removed."))
	t.Setenv("DATABASE_URL", db.URL)
	require.Equal(t, exitUsage, command(t, "status").code, "both are set")
	require.Equal(t, exitUsage, on(t, db, "install", "--shards", "3").code)
}
