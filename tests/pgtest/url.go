package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
)

// A running server, named by its connection string.
type running string

func useURL(context.Context, []string) (host, error) {
	dsn := os.Getenv("RATELIMIT_DATABASE_URL")
	if dsn == "" {
		return nil, fmt.Errorf("%w: RATELIMIT_DATABASE_URL is not set", errAbsent)
	}
	return running(dsn), nil
}

func (dsn running) URL(database string) string {
	if database == "" {
		return string(dsn)
	}
	if u, err := url.Parse(string(dsn)); err == nil && u.Scheme != "" {
		u.Path = "/" + database
		return u.String()
	}
	return string(dsn) + " dbname='" + strings.ReplaceAll(database, "'", `\'`) + "'" // the last one counts
}

var errNotOurs = errors.New("pgtest: the server of RATELIMIT_DATABASE_URL is not the tests' to stop")

func (running) Stop(context.Context, bool) error { return errNotOurs }
func (running) Kill(context.Context) error       { return errNotOurs }
func (running) Freeze(context.Context) error     { return errNotOurs }
func (running) Thaw(context.Context) error       { return errNotOurs }
func (running) Start(context.Context) error      { return errNotOurs }
func (running) Close() error                     { return nil }
