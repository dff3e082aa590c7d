package config_test

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

func environment(pairs ...string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for _, pair := range pairs {
			if n, value, _ := strings.Cut(pair, "="); n == name {
				return value, true
			}
		}
		return "", false
	}
}

func file(t *testing.T, lines ...string) string {
	path := filepath.Join(t.TempDir(), "settings")
	require.NoError(t, os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600))
	return path
}

func TestLoad_Defaults(t *testing.T) {
	t.Parallel()
	c := kit.NoError(config.Load("", environment("DATABASE_URL=postgres://db")))(t)
	require.Equal(t, config.Config{
		Databases: config.Databases{URLs: []string{"postgres://db"}}, GRPCAddr: "127.0.0.1:8081", HTTPAddr: "127.0.0.1:8080",
		MaxMessageBytes: 1 << 20, MaxStreams: 1000, MaxCalls: 1000,
		CallTimeout: 2 * time.Second, StopTimeout: 10 * time.Second, LockTimeout: 500 * time.Millisecond, DatabaseCalls: 2,
	}, c)
}

func TestLoad_TheEnvironmentComesBeforeTheFile(t *testing.T) {
	t.Parallel()
	path := file(t, "# settings", "", `DATABASE_URL="postgres://file?a=b"`, "GRPC_ADDR=off", "TOKENS='a, b'", "CALL_TIMEOUT=1s", "NO_FLUSH=true")
	c := kit.NoError(config.Load(path, environment("CALL_TIMEOUT=3s", "LOCK_TIMEOUT=0")))(t)
	require.Equal(t, []string{"postgres://file?a=b"}, c.URLs)
	require.Empty(t, c.GRPCAddr)
	require.Equal(t, []string{"a", "b"}, c.Tokens)
	require.Equal(t, 3*time.Second, c.CallTimeout)
	require.Zero(t, c.LockTimeout)
	require.True(t, c.NoFlush)
}

// One error has all mistakes, with the name or the line.
func TestLoad_Mistakes(t *testing.T) {
	t.Parallel()
	_, err := config.Load("", environment("GRPC_ADDR=8081", "HTTP_ADDR=", "MAX_CALLS=0", "MAX_STREAMS=many", "CALL_TIMEOUT=5", "STOP_TIMEOUT=-1s",
		"LOCK_TIMEOUT=1us", "NO_FLUSH=perhaps", "TOKENS=secret,,other", "DEFAULT_CAPACITY=5", "TLS_KEY_FILE=key"))
	for _, want := range []string{"DATABASE_URL: ", "GRPC_ADDR: ", "HTTP_ADDR: ", "MAX_CALLS: ", "MAX_STREAMS: ", "CALL_TIMEOUT: ", "STOP_TIMEOUT: ",
		"LOCK_TIMEOUT: ", "NO_FLUSH: ", "TOKENS: ", "DEFAULT_CAPACITY, DEFAULT_REFILL_RATE: ", "TLS_CERT_FILE, TLS_KEY_FILE: "} {
		require.ErrorContains(t, err, want)
	}
	require.NotContains(t, err.Error(), "secret")

	for _, setting := range []string{"DATABASE_URL=postgress://app:secret@db/app?sslmode=require", "SHARD_URLS=postgres://a mysql://app:secret@b"} {
		name, _, _ := strings.Cut(setting, "=")
		_, err = config.Load("", environment(setting))
		require.ErrorContains(t, err, name+": a URL of a database begins with postgres://")
		require.NotContains(t, err.Error(), "secret")
	}
	require.NoError(t, kit.ErrorOf(config.Load("", environment("DATABASE_URL=host=db application_name=a://b"))))

	path := file(t, "MAX_CALLS", "", "MAX_CALL=5", "MAX_CALLS=5", "MAX_CALLS=6")
	_, err = config.Load(path, environment("DATABASE_URL=postgres://db"))
	for _, want := range []string{path + ":1: ", path + `:3: no setting is called "MAX_CALL"`, path + ":5: MAX_CALLS is set twice"} {
		require.ErrorContains(t, err, want)
	}
	_, err = config.Load(path+" elsewhere", environment())
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = config.Load("", environment("DATABASE_URL=postgres://db", "GRPC_ADDR=off", "HTTP_ADDR=off"))
	require.ErrorContains(t, err, "both are off")
	_, err = config.Load("", environment("DATABASE_URL=postgres://db", "STATUS_PAGE=true", "HTTP_ADDR=off"))
	require.ErrorContains(t, err, "STATUS_PAGE: HTTP_ADDR is off")
	_, err = config.Load("", environment("DATABASE_URL=postgres://db", "TLS_CERT_FILE="+path, "TLS_KEY_FILE="+path))
	require.ErrorContains(t, err, "TLS_CERT_FILE, TLS_KEY_FILE: ")
}

// A secret that was not mounted is an empty setting.
func TestLoad_TokensAreNotEmpty(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"TOKENS", "MONITORING_TOKENS"} {
		_, err := config.Load("", environment("DATABASE_URL=postgres://db", name+"="))
		require.EqualError(t, err, name+": it is empty, which would let everybody in: set a token, or leave the setting out")
		_, err = config.Load(file(t, name+"="), environment("DATABASE_URL=postgres://db"))
		require.ErrorContains(t, err, name+": it is empty")
	}
}

func TestMisspelled_NamesTheSetting(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"TOKEN": "TOKENS", "MONITORING_TOKEN": "MONITORING_TOKENS", "PGRATELIMIT_TOKEN": "TOKENS", "PGRATELIMIT_MAX_CALLS": "MAX_CALLS"} {
		require.EqualError(t, config.Misspelled([]string{"HOME=/", name + "=x"}), name+" is no setting: did you mean "+want+"?")
	}
	require.NoError(t, config.Misspelled([]string{"TOKENS=x", "MAX_CALL=5", "PGRATELIMIT_TEST_AS_PROGRAM=1", "GITHUB_TOKEN=x"}))
}

// With a timeout of 0 no call would succeed. gRPC takes MAX_STREAMS in 32 bits, of which 0 is no bound at all.
func TestLoad_NumbersHaveBounds(t *testing.T) {
	t.Parallel()
	for setting, isRight := range map[string]bool{
		"CALL_TIMEOUT=0s": false, "CALL_TIMEOUT=1ms": true, "STOP_TIMEOUT=0s": false, "STOP_TIMEOUT=1ms": true, "LOCK_TIMEOUT=0": true,
		"CALL_TIMEOUT=576h": true, "CALL_TIMEOUT=577h": false, "LOCK_TIMEOUT=577h": false, "STOP_TIMEOUT=2562047h": false, "CALL_TIMEOUT=9999999h": false,
		"CALL_TIMEOUT=5": false, "CALL_TIMEOUT=NaN": false, "CALL_TIMEOUT=Infinity": false, "CALL_TIMEOUT=-1s": false, "CALL_TIMEOUT=1us": false,
		"PREFETCH=api=0x1p-4": false, "PREFETCH=api=1e-1": false, "PREFETCH=api=.5": true,
		"MAX_STREAMS=1": true, "MAX_STREAMS=2147483647": true, "MAX_STREAMS=2147483648": false, "MAX_STREAMS=4294967296": false, "MAX_STREAMS=99999999999999999999": false,
	} {
		_, err := config.Load("", environment("DATABASE_URL=postgres://db", setting))
		require.Equal(t, isRight, err == nil, "%s: %v", setting, err)
	}
}

// A single quote is part of the token.
func TestLoad_QuotesComeOffInPairs(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{`"a"`: "a", `'a'`: "a", `"a'`: `"a'`, `a"`: `a"`, `'a`: `'a`, `"'a'"`: "'a'", `""a""`: `"a"`, `"`: `"`} {
		c := kit.NoError(config.Load(file(t, "DATABASE_URL=postgres://db", "TOKENS="+value), environment()))(t)
		require.Equal(t, []string{want}, c.Tokens)
	}
}

// Reading would stop there: without TOKENS below it, everybody may call.
func TestLoad_ALineThatIsTooLongIsAnError(t *testing.T) {
	t.Parallel()
	_, err := config.Load(file(t, "DATABASE_URL=postgres://db", "# "+strings.Repeat("x", bufio.MaxScanTokenSize), "TOKENS=secret"), environment())
	require.ErrorIs(t, err, bufio.ErrTooLong)
}

func TestLoad_DefaultPolicy(t *testing.T) {
	t.Parallel()
	load := func(capacity, rate string) (client.Policy, error) {
		c, err := config.Load("", environment("DATABASE_URL=postgres://db", "DEFAULT_CAPACITY="+capacity, "DEFAULT_REFILL_RATE="+rate))
		return c.DefaultPolicy, err
	}
	for rate, want := range map[string]client.Policy{
		"10":       {Refill: 10, Every: time.Second},
		"0.5":      {Refill: 1, Every: 2 * time.Second},
		"2.5":      {Refill: 5, Every: 2 * time.Second},
		"0.000001": {Refill: 1, Every: 1e6 * time.Second},
		"0":        {Refill: client.Zero, Every: time.Second},
	} {
		policy, err := load("100", rate)
		require.NoError(t, err, rate)
		want.Name, want.Capacity = "default", 100
		require.Equal(t, want, policy, rate)
	}
	for _, bad := range [][2]string{{"0", "1"}, {"-1", "1"}, {"1.5", "1"}, {"many", "1"}, {"1", "-1"}, {"1", "1e3"}, {"1", "1/2"}, {"1", "."}, {"1", "0.0000001"}, {"1", "NaN"}, {"1", "99999999999999999999"}} {
		_, err := load(bad[0], bad[1])
		require.Error(t, err, bad)
	}
}

func TestLoad_Shards(t *testing.T) {
	t.Parallel()
	c := kit.NoError(config.Load(file(t, `SHARD_URLS="postgres://a/0 postgres://b/1"`), environment()))(t)
	require.Equal(t, config.Databases{URLs: []string{"postgres://a/0", "postgres://b/1"}, AreShards: true}, c.Databases)
	c = kit.NoError(config.Load("", environment("SHARD_URLS=\n  postgres://a/0\n  postgres://a/1\n  postgres://b/2\n  postgres://b/3\n")))(t)
	require.Len(t, c.URLs, 4)
	_, err := config.Load("", environment("SHARD_URLS=postgres://a/0 postgres://a/1 postgres://a/2"))
	require.ErrorContains(t, err, "SHARD_URLS: it lists 3 databases, and the number of shards is a power of two")
	_, err = config.Load("", environment("DATABASE_URL=postgres://db", "SHARD_URLS=postgres://a/0 postgres://a/1"))
	require.ErrorContains(t, err, "DATABASE_URL, SHARD_URLS: set one of them")
}

func TestLoad_Prefetch(t *testing.T) {
	t.Parallel()
	load := func(prefetches string, more ...string) (config.Config, error) {
		return config.Load("", environment(append(more, "DATABASE_URL=postgres://db", "PREFETCH="+prefetches)...))
	}
	c := kit.NoError(load("api, search=0.05,edge.remote_address,all=1", "DATABASE_CALLS=3"))(t)
	require.Equal(t, []client.Prefetch{{Policy: "api"}, {Policy: "search", MaxShare: 0.05}, {Policy: "edge.remote_address"}, {Policy: "all", MaxShare: 1}}, c.Prefetches)
	require.Equal(t, 5, c.SharedConnections())
	c = kit.NoError(load(""))(t)
	require.Equal(t, 2, c.SharedConnections())
	for bad, want := range map[string]string{
		"api,": "empty", "=0.1": "empty", "api,search,api=0.1": `policy "api" is there twice`,
		"api=": "", "api=0": "", "api=1.5": "", "api=-1": "", "api=NaN": "", "api=10%": `"10%" is no part of a capacity, such as 0.05, of policy "api"`,
	} {
		_, err := load(bad)
		require.ErrorContains(t, err, "PREFETCH: ", bad)
		require.ErrorContains(t, err, want, bad)
	}
}
