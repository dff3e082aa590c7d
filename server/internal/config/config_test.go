package config_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// load reads a file of lines, if there are any, and an environment of lines NAME=value.
func load(t *testing.T, lines []string, environment ...string) (config.Config, error) {
	path := ""
	if lines != nil {
		path = kit.File(t, "settings", strings.Join(lines, "\n"))
	}
	return config.Load(path, func(name string) (value string, ok bool) {
		for _, line := range environment {
			if value, ok = strings.CutPrefix(line, name+"="); ok {
				return value, true
			}
		}
		return "", false
	})
}

const db = "DATABASE_URL=postgres://db"

func TestLoad_Defaults(t *testing.T) {
	t.Parallel()
	require.Equal(t, config.Config{
		Databases: config.Databases{URLs: []string{"postgres://db"}}, GRPCAddr: "127.0.0.1:8081", HTTPAddr: "127.0.0.1:8080",
		MaxMessageBytes: 1 << 20, MaxStreams: 1000, MaxCalls: 1000,
		CallTimeout: 2 * time.Second, StopTimeout: 10 * time.Second, LockTimeout: 500 * time.Millisecond, DatabaseCalls: 2,
	}, kit.NoError(load(t, nil, db))(t))
}

func TestLoad_TheEnvironmentComesBeforeTheFile(t *testing.T) {
	t.Parallel()
	lines := []string{"# settings", "", `DATABASE_URL="postgres://file?a=b"`, "GRPC_ADDR=off", "TOKENS='a, b'", "CALL_TIMEOUT=1s", "NO_FLUSH=true"}
	c := kit.NoError(load(t, lines, "CALL_TIMEOUT=3s", "LOCK_TIMEOUT=0"))(t)
	require.Equal(t, []string{"postgres://file?a=b"}, c.URLs)
	require.Empty(t, c.GRPCAddr)
	require.Equal(t, []string{"a", "b"}, c.Tokens)
	require.Equal(t, 3*time.Second, c.CallTimeout)
	require.Zero(t, c.LockTimeout)
	require.True(t, c.NoFlush)
	// A single quote is part of the token.
	for value, want := range map[string]string{`"a"`: "a", `'a'`: "a", `"a'`: `"a'`, `a"`: `a"`, `'a`: `'a`, `"'a'"`: "'a'", `""a""`: `"a"`, `"`: `"`} {
		require.Equal(t, []string{want}, kit.NoError(load(t, []string{db, "TOKENS=" + value}))(t).Tokens)
	}
}

// An environment, separated by |, and its error: none, or what it has. With a timeout of 0 no call would succeed. gRPC takes MAX_STREAMS
// in 32 bits, of which 0 is no bound at all. A secret that was not mounted is an empty setting.
func TestLoad_Mistakes(t *testing.T) {
	t.Parallel()
	const rate = "DEFAULT_CAPACITY=1|DEFAULT_REFILL_RATE="
	for settings, want := range map[string]string{
		"DATABASE_URL=": "DATABASE_URL: it is not set", "GRPC_ADDR=8081": "GRPC_ADDR: ", "HTTP_ADDR=": "HTTP_ADDR: ", "GRPC_ADDR=off|HTTP_ADDR=off": "both are off",
		"STATUS_PAGE=true|HTTP_ADDR=off": "STATUS_PAGE: HTTP_ADDR is off", "TLS_KEY_FILE=key": "TLS_CERT_FILE, TLS_KEY_FILE: set both or none",
		"TLS_CERT_FILE=none|TLS_KEY_FILE=none": "TLS_CERT_FILE, TLS_KEY_FILE: open none", "NO_FLUSH=perhaps": "NO_FLUSH: ",
		"TOKENS=secret,,other": "TOKENS: a token is empty", "TOKENS=": "TOKENS: it is empty, which would let everybody in", "MONITORING_TOKENS=": "MONITORING_TOKENS: it is empty",
		"DATABASE_URL=postgress://app:secret@db/app?sslmode=require": "DATABASE_URL: a URL of a database begins with postgres://",
		"DATABASE_URL=host=db application_name=a://b":                "",
		"DATABASE_URL=secret@db:5432/app":                            "DATABASE_URL: a URL of a database begins with postgres://",
		"DATABASE_URL=|SHARD_URLS=postgres://a secret@b/app":         "SHARD_URLS: a URL of a database begins with postgres://",
		"DATABASE_URL=|SHARD_URLS=postgres://a mysql://app:secret@b": "SHARD_URLS: a URL of a database begins with postgres://",
		"DATABASE_URL=|SHARD_URLS=postgres://a host=b host=c":        "SHARD_URLS: it lists 3 databases, and the number of shards is a power of two",
		"SHARD_URLS=postgres://a/0 postgres://a/1":                   "DATABASE_URL, SHARD_URLS: set one of them",
		"CALL_TIMEOUT=0s": "CALL_TIMEOUT: ", "CALL_TIMEOUT=1ms": "", "STOP_TIMEOUT=0s": "STOP_TIMEOUT: ", "STOP_TIMEOUT=1ms": "", "LOCK_TIMEOUT=0": "",
		"CALL_TIMEOUT=576h": "", "CALL_TIMEOUT=577h": "is longer than", "LOCK_TIMEOUT=577h": "is longer than", "STOP_TIMEOUT=9999999h": "STOP_TIMEOUT: ",
		"CALL_TIMEOUT=5": "CALL_TIMEOUT: ", "CALL_TIMEOUT=NaN": "CALL_TIMEOUT: ", "CALL_TIMEOUT=-1s": "CALL_TIMEOUT: ", "LOCK_TIMEOUT=1us": "LOCK_TIMEOUT: ",
		"MAX_CALLS=0": "MAX_CALLS: ", "MAX_STREAMS=many": "MAX_STREAMS: ", "MAX_STREAMS=1": "", "MAX_STREAMS=2147483647": "", "MAX_STREAMS=4294967296": "MAX_STREAMS: ",
		"PREFETCH=": "", "PREFETCH=api=.5": "", "PREFETCH=api,": "PREFETCH: the name of a policy is empty", "PREFETCH==0.1": "is empty",
		"PREFETCH=api,search,api=0.1": `policy "api" is there twice`, "PREFETCH=api=10%": `"10%" is no part of a capacity, such as 0.05, of policy "api"`,
		"PREFETCH=api=": "no part", "PREFETCH=api=0": "no part", "PREFETCH=api=1.5": "no part", "PREFETCH=api=-1": "no part", "PREFETCH=api=NaN": "no part",
		"PREFETCH=api=0x1p-4": "no part", "PREFETCH=api=1e-1": "no part",
		"DEFAULT_CAPACITY=5": "DEFAULT_CAPACITY, DEFAULT_REFILL_RATE: set both or none", "DEFAULT_CAPACITY=0|DEFAULT_REFILL_RATE=1": "DEFAULT_CAPACITY: ",
		"DEFAULT_CAPACITY=1.5|DEFAULT_REFILL_RATE=1": "DEFAULT_CAPACITY: ", rate + "-1": "DEFAULT_REFILL_RATE: ", rate + "1e3": "DEFAULT_REFILL_RATE: ",
		rate + "1/2": "DEFAULT_REFILL_RATE: ", rate + ".": "DEFAULT_REFILL_RATE: ", rate + "0.0000001": "DEFAULT_REFILL_RATE: ", rate + "NaN": "DEFAULT_REFILL_RATE: ",
		rate + "99999999999999999999":              "DEFAULT_REFILL_RATE: ",
		"MAX_CALLS=0|CALL_TIMEOUT=5|GRPC_ADDR=off": "MAX_CALLS: \"0\" is no whole number, 1 or more\nCALL_TIMEOUT: ",
	} {
		_, err := load(t, nil, append(strings.Split(settings, "|"), db)...)
		if want == "" {
			require.NoError(t, err, settings)
			continue
		}
		require.ErrorContains(t, err, want, settings)
		require.NotContains(t, err.Error(), "secret")
	}
	_, err := load(t, []string{"MAX_CALLS", "", "MAX_CALL=5", "MAX_CALLS=5", "MAX_CALLS=6", "TOKEN=x"}, db)
	for _, want := range []string{"/settings:1: this is not NAME=value", `/settings:3: no setting is called "MAX_CALL": pgratelimit serve --help lists them`, "/settings:5: MAX_CALLS is set twice",
		"/settings:6: TOKEN is no setting: did you mean TOKENS?"} {
		require.ErrorContains(t, err, want)
	}
	_, err = config.Load("elsewhere", os.LookupEnv)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestMisspelled_NamesTheSetting(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"TOKEN": "TOKENS", "MONITORING_TOKEN": "MONITORING_TOKENS", "PGRATELIMIT_TOKEN": "TOKENS", "PGRATELIMIT_MAX_CALLS": "MAX_CALLS"} {
		require.EqualError(t, config.Misspelled([]string{"HOME=/", name + "=x"}), name+" is no setting: did you mean "+want+"?")
	}
	require.NoError(t, config.Misspelled([]string{"TOKENS=x", "MAX_CALL=5", "PGRATELIMIT_TEST_AS_PROGRAM=1", "GITHUB_TOKEN=x"}))
}

func TestLoad_DefaultPolicy(t *testing.T) {
	t.Parallel()
	for rate, want := range map[string]client.Policy{
		"10":       {Refill: 10, Every: time.Second},
		"0.5":      {Refill: 1, Every: 2 * time.Second},
		"2.5":      {Refill: 5, Every: 2 * time.Second},
		"0.000001": {Refill: 1, Every: 1e6 * time.Second},
		"0":        {Refill: client.Zero, Every: time.Second},
	} {
		want.Name, want.Capacity = "default", 100
		require.Equal(t, want, kit.NoError(load(t, nil, db, "DEFAULT_CAPACITY=100", "DEFAULT_REFILL_RATE="+rate))(t).DefaultPolicy, rate)
	}
}

func TestLoad_ShardsAndPrefetches(t *testing.T) {
	t.Parallel()
	c := kit.NoError(load(t, []string{`SHARD_URLS="postgres://a/0 postgres://b/1"`}, "PREFETCH=api, search=0.05,all=1", "DATABASE_CALLS=3"))(t)
	require.Equal(t, config.Databases{URLs: []string{"postgres://a/0", "postgres://b/1"}, AreShards: true}, c.Databases)
	require.Equal(t, []client.Prefetch{{Policy: "api"}, {Policy: "search", MaxShare: 0.05}, {Policy: "all", MaxShare: 1}}, c.Prefetches)
	require.Equal(t, 5, c.SharedConnections())
	c = kit.NoError(load(t, nil, "SHARD_URLS=\n  postgres://a/0\n  postgres://a/1\n  postgres://b/2\n  postgres://b/3\n"))(t)
	require.Len(t, c.URLs, 4)
	require.Equal(t, 2, c.SharedConnections())
}
