package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// The exit codes, which docs/server.md lists.
const (
	exitDone        = 0
	exitError       = 1
	exitNo          = 2
	exitUsage       = 64 // those of sysexits.h
	exitUnavailable = 69
)

// An answerNo is no error: what the command was asked has been printed, and it is a no.
type answerNo struct{}

func (answerNo) Error() string { return "the answer is no" }

type usageError struct{ error }

func exitCode(err error) int {
	var no answerNo
	var usage usageError
	var connect *pgconn.ConnectError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &no):
		return exitNo
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &connect), errors.Is(err, context.DeadlineExceeded):
		return exitUnavailable
	}
	return exitError
}

// complain prints an error: with --json as an object.
func (p *program) complain(w io.Writer, err error) {
	lines := strings.Split(err.Error(), "\n")
	text := strings.Join(slices.Compact(lines), "\n") // pgx tries an address with TLS and without, and says twice that nobody is there
	if !p.json {
		fmt.Fprintln(w, text)
		return
	}
	complaint := struct {
		Error    string `json:"error"`
		SQLState string `json:"sqlstate,omitempty"`
	}{Error: text}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		complaint.SQLState = pgErr.Code
	}
	_ = encode(w, complaint) // there is nowhere to say that it failed
}
