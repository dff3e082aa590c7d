// Package config reads the settings of pgratelimit serve, from the environment, from a file, or by default.
package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// A Config has all settings.
type Config struct {
	Databases

	GRPCAddr string // empty for none
	HTTPAddr string // empty for none

	// DefaultPolicy is defined at the start, unless it exists. Without a name there is none.
	DefaultPolicy client.Policy

	EnvoyRules string // file or folder, and empty for none

	TLS              *tls.Config // nil for none
	Tokens           []string    // of calls; without one everybody may call
	MonitoringTokens []string    // of metrics and health

	StatusPage bool // at / of HTTPAddr

	MaxMessageBytes int
	MaxStreams      int // at a time, of a gRPC connection
	MaxCalls        int // under way at a time, of a database
	CallTimeout     time.Duration
	StopTimeout     time.Duration
	LockTimeout     time.Duration // 0 leaves it to the database

	DatabaseCalls int // of the Combiner of a database, at a time
	NoFlush       bool
	DenialCache   bool

	Prefetches []client.Prefetch // none unless asked for
}

// SharedConnections is the number of connections to a database that the Combiner and the Prefetcher use.
func (c Config) SharedConnections() int {
	if len(c.Prefetches) == 0 {
		return c.DatabaseCalls
	}
	return c.DatabaseCalls + 2
}

// Databases are the databases of a limiter.
type Databases struct {
	URLs      []string // one, or those of all shards in their order
	AreShards bool
}

// A Setting can be set by its name.
type Setting struct {
	Name    string
	Default string
	Help    string
	set     func(value string) error
}

// settings has the values before they are joined to a Config.
type settings struct {
	Config
	databaseURL       string
	shardURLs         string
	capacity, rate    string
	certFile, keyFile string
}

// Settings lists all names.
func Settings() []Setting { return new(settings).list() }

func (c *settings) list() []Setting {
	return []Setting{
		{"DATABASE_URL", "", "the database, such as postgres://app@db/app", into(&c.databaseURL, text)},
		{"SHARD_URLS", "", "in its place, the databases of all shards, in order, separated by white space", into(&c.shardURLs, text)},
		{"GRPC_ADDR", "127.0.0.1:8081", "where gRPC listens; off for nowhere", into(&c.GRPCAddr, address)},
		{"HTTP_ADDR", "127.0.0.1:8080", "where JSON over HTTP, health and metrics listen; off for nowhere", into(&c.HTTPAddr, address)},
		{"DEFAULT_CAPACITY", "", "defines the policy default with so many tokens, unless it is there", into(&c.capacity, text)},
		{"DEFAULT_REFILL_RATE", "", "its tokens a second, such as 10 or 0.5", into(&c.rate, text)},
		{"ENVOY_RULES", "", "file or folder of rules for Envoy; SIGHUP reads them again", into(&c.EnvoyRules, text)},
		{"TLS_CERT_FILE", "", "certificate and chain of both listeners, in PEM", into(&c.certFile, text)},
		{"TLS_KEY_FILE", "", "its private key, in PEM", into(&c.keyFile, text)},
		{"TOKENS", "", "bearer tokens, separated by commas, one of which every call needs", into(&c.Tokens, tokens)},
		{"MONITORING_TOKENS", "", "bearer tokens, one of which metrics and health need, except /livez", into(&c.MonitoringTokens, tokens)},
		{"STATUS_PAGE", "false", "true shows requests, policies and the emptiest buckets, with their keys, at / of HTTP_ADDR", into(&c.StatusPage, boolean)},
		{"MAX_MESSAGE_BYTES", "1048576", "the longest request", into(&c.MaxMessageBytes, number)},
		{"MAX_STREAMS", "1000", "calls under way on one gRPC connection; others wait at the client", into(&c.MaxStreams, number)},
		{"MAX_CALLS", "1000", "calls under way of one database; others are refused", into(&c.MaxCalls, number)},
		{"CALL_TIMEOUT", "2s", "the longest time for a call; a gRPC deadline may be shorter", into(&c.CallTimeout, timeout)},
		{"STOP_TIMEOUT", "10s", "the longest time for calls under way when the server stops", into(&c.StopTimeout, timeout)},
		{"LOCK_TIMEOUT", "500ms", "the longest wait for a locked bucket; 0 leaves it to the database, for a pooler that refuses the setting", into(&c.LockTimeout, timeoutOrNone)},
		{"DATABASE_CALLS", "2", "calls to the database that carry the requests of all callers, at a time", into(&c.DatabaseCalls, number)},
		{"NO_FLUSH", "false", "true answers before a grant is on disk: a crash of the database may forget the last 0.6 s", into(&c.NoFlush, boolean)},
		{"DENIAL_CACHE", "false", "true repeats the denials of 131,072 buckets from memory until their retry_after", into(&c.DenialCache, boolean)},
		{"PREFETCH", "", "policies whose busy buckets are answered from tokens taken in advance, separated by commas; api=0.05 takes at most that part of a capacity, and not a tenth", into(&c.Prefetches, prefetches)},
	}
}

// Misspelled finds a variable that was meant to be a setting: with the prefix PGRATELIMIT_, or TOKEN, without whose S everybody may call.
func Misspelled(environ []string) error {
	for _, pair := range environ {
		name, _, _ := strings.Cut(pair, "=")
		bare, hasPrefix := strings.CutPrefix(name, "PGRATELIMIT_")
		for _, s := range Settings() {
			if hasPrefix && bare == s.Name || strings.HasSuffix(s.Name, "TOKENS") && bare+"S" == s.Name {
				return fmt.Errorf("%s is no setting: did you mean %s?", name, s.Name)
			}
		}
	}
	return nil
}

// Load reads the settings. The environment comes before the file of the path, if there is one.
func Load(path string, environment func(name string) (value string, ok bool)) (Config, error) {
	file := map[string]string{}
	if path != "" {
		var err error
		if file, err = readFile(path); err != nil {
			return Config{}, err
		}
	}
	var c settings
	var errs []error
	for _, s := range c.list() {
		value, isGiven := environment(s.Name)
		if !isGiven {
			value, isGiven = file[s.Name]
		}
		if !isGiven {
			if value = s.Default; value == "" {
				continue
			}
		}
		if err := s.set(value); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s.Name, err))
		}
	}
	errs = append(errs, c.join()...)
	return c.Config, errors.Join(errs...)
}

// join checks and joins the settings that belong together.
func (c *settings) join() (errs []error) {
	var err error
	if c.Databases, err = NewDatabases(c.databaseURL, c.shardURLs); err != nil {
		errs = append(errs, err)
	}
	if c.GRPCAddr == "" && c.HTTPAddr == "" {
		errs = append(errs, errors.New("GRPC_ADDR, HTTP_ADDR: both are off"))
	}
	if c.StatusPage && c.HTTPAddr == "" {
		errs = append(errs, errors.New("STATUS_PAGE: HTTP_ADDR is off"))
	}
	if (c.certFile == "") != (c.keyFile == "") {
		errs = append(errs, errors.New("TLS_CERT_FILE, TLS_KEY_FILE: set both or none"))
	} else if c.certFile != "" {
		certificate, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
		if err != nil {
			errs = append(errs, fmt.Errorf("TLS_CERT_FILE, TLS_KEY_FILE: %w", err))
		}
		c.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
	}
	if (c.capacity == "") != (c.rate == "") {
		errs = append(errs, errors.New("DEFAULT_CAPACITY, DEFAULT_REFILL_RATE: set both or none"))
	} else if c.capacity != "" {
		if c.DefaultPolicy, err = defaultPolicy(c.capacity, c.rate); err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// NewDatabases reads DATABASE_URL and SHARD_URLS, of which one is set.
func NewDatabases(databaseURL, shardURLs string) (Databases, error) {
	urls := strings.Fields(shardURLs)
	switch n := len(urls); {
	case databaseURL == "" && n == 0:
		return Databases{}, errors.New("DATABASE_URL: it is not set, and neither is SHARD_URLS; set it to the database, such as postgres://app@db/app")
	case databaseURL != "" && n > 0:
		return Databases{}, errors.New("DATABASE_URL, SHARD_URLS: set one of them")
	case isOfAnother(databaseURL):
		return Databases{}, errors.New("DATABASE_URL: " + otherScheme)
	case databaseURL != "":
		return Databases{URLs: []string{databaseURL}}, nil
	case slices.ContainsFunc(urls, isOfAnother):
		return Databases{}, errors.New("SHARD_URLS: " + otherScheme)
	case n&(n-1) != 0:
		return Databases{}, fmt.Errorf("SHARD_URLS: it lists %d databases, and the number of shards is a power of two", n)
	}
	return Databases{urls, true}, nil
}

const otherScheme = "a URL of a database begins with postgres:// or postgresql://"

// isOfAnother reports whether text is a URL of another scheme, or of none. The driver would read one of another as settings, connect
// to this machine, and send the password there.
func isOfAnother(text string) bool {
	scheme, _, isURL := strings.Cut(text, "://")
	return text != "" && !strings.ContainsAny(scheme, " =") && (!isURL || scheme != "postgres" && scheme != "postgresql")
}

// maxRateDigits is the number of decimals: enough for a token a fortnight.
const maxRateDigits = 6

// defaultPolicy converts a rate to whole tokens: half a token a second is one token every two seconds.
func defaultPolicy(capacity, rate string) (client.Policy, error) {
	tokens, err := strconv.ParseInt(capacity, 10, 64)
	if err != nil || tokens < 1 {
		return client.Policy{}, fmt.Errorf("DEFAULT_CAPACITY: %q is no whole number of tokens, 1 or more", capacity)
	}
	_, fraction, _ := strings.Cut(rate, ".")
	perSecond, ok := new(big.Rat).SetString(rate)
	if !ok || strings.Trim(rate, "0123456789.") != "" || len(fraction) > maxRateDigits || !perSecond.Num().IsInt64() {
		return client.Policy{}, fmt.Errorf("DEFAULT_REFILL_RATE: %q is no number of tokens a second, such as 10 or 0.5, of at most %d decimals", rate, maxRateDigits)
	}
	every := time.Duration(perSecond.Denom().Int64()) * time.Second
	policy := client.Policy{Name: service.DefaultPolicy, Capacity: tokens, Refill: perSecond.Num().Int64(), Every: every}
	if policy.Refill == 0 {
		policy.Refill = client.Zero
	}
	return policy, nil
}

// readFile reads lines NAME=value, as systemd and Docker do. A value may be in quotes.
func readFile(path string) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("the file of settings: %w", err)
	}
	known := Settings()
	values := map[string]string{}
	var errs []error
	for n, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		name, value, isPair := strings.Cut(line, "=")
		_, isAgain := values[name]
		misspelled := Misspelled([]string{line})
		switch {
		case misspelled != nil:
			err = misspelled
		case !isPair:
			err = errors.New("this is not NAME=value")
		case !slices.ContainsFunc(known, func(s Setting) bool { return s.Name == name }):
			err = fmt.Errorf("no setting is called %q: pgratelimit serve --help lists them", name)
		case isAgain:
			err = fmt.Errorf("%s is set twice", name)
		default:
			values[name] = unquoted(value)
			continue
		}
		errs = append(errs, fmt.Errorf("%s:%d: %w", path, n+1, err))
	}
	return values, errors.Join(errs...)
}

func unquoted(value string) string {
	for _, quote := range []string{`"`, `'`} {
		if len(value) >= 2 && strings.HasPrefix(value, quote) && strings.HasSuffix(value, quote) {
			return value[1 : len(value)-1]
		}
	}
	return value
}

func into[T any](to *T, read func(string) (T, error)) func(string) error {
	return func(value string) error {
		parsed, err := read(value)
		if err == nil {
			*to = parsed
		}
		return err
	}
}

func text(value string) (string, error) { return value, nil }

func address(value string) (string, error) {
	if value == "off" {
		return "", nil
	}
	if _, _, err := net.SplitHostPort(value); err != nil {
		return "", fmt.Errorf("%q is no host:port, and not off", value)
	}
	return value, nil
}

func tokens(value string) (list []string, err error) {
	if value == "" {
		return nil, errors.New("it is empty, which would let everybody in: set a token, or leave the setting out")
	}
	for token := range strings.SplitSeq(value, ",") {
		if token = strings.TrimSpace(token); token == "" {
			return nil, errors.New("a token is empty")
		}
		list = append(list, token)
	}
	return list, nil
}

func prefetches(value string) (list []client.Prefetch, err error) {
	if value == "" {
		return nil, nil
	}
	for item := range strings.SplitSeq(value, ",") {
		policy, share, isBounded := strings.Cut(strings.TrimSpace(item), "=")
		l := client.Prefetch{Policy: policy}
		if isBounded {
			l.MaxShare, err = strconv.ParseFloat(share, 64)
			if err != nil || strings.Trim(share, "0123456789.") != "" || !(0 < l.MaxShare && l.MaxShare <= 1) {
				return nil, fmt.Errorf("%q is no part of a capacity, such as 0.05, of policy %q", share, policy)
			}
		}
		switch {
		case policy == "":
			return nil, errors.New("the name of a policy is empty")
		case slices.ContainsFunc(list, func(other client.Prefetch) bool { return other.Policy == policy }):
			return nil, fmt.Errorf("policy %q is there twice", policy)
		}
		list = append(list, l)
	}
	return list, nil
}

func number(value string) (int, error) {
	n, err := strconv.ParseInt(value, 10, 32)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%q is no whole number, 1 or more", value)
	}
	return int(n), nil
}

func timeout(value string) (time.Duration, error) {
	d, err := timeoutOrNone(value)
	if err == nil && d == 0 {
		err = fmt.Errorf("%q would give it no time: write 1ms or more", value)
	}
	return d, err
}

// longest is a timeout that PostgreSQL takes, and that can be doubled.
const longest = 24 * 24 * time.Hour

func timeoutOrNone(value string) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	switch {
	case err != nil || d < 0 || d%time.Millisecond != 0:
		return 0, fmt.Errorf("%q is no time in whole milliseconds, such as 500ms or 2s", value)
	case d > longest:
		return 0, fmt.Errorf("%q is longer than %v", value, longest)
	}
	return d, nil
}

func boolean(value string) (bool, error) {
	b, err := strconv.ParseBool(value)
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false", value)
	}
	return b, nil
}
