package config

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// The kinds of settings. Each reads a value into the field that it is told.

func text(field func(*settings) *string) func(*settings, string) error {
	return func(c *settings, value string) error {
		*field(c) = value
		return nil
	}
}

func address(field func(*settings) *string) func(*settings, string) error {
	return func(c *settings, value string) error {
		if value == "off" {
			return nil
		}
		if _, _, err := net.SplitHostPort(value); err != nil {
			return fmt.Errorf("%q is no host:port, and not off", value)
		}
		*field(c) = value
		return nil
	}
}

func tokens(field func(*settings) *[]string) func(*settings, string) error {
	return func(c *settings, value string) error {
		if value == "" {
			return errors.New("it is empty, which would let everybody in: set a token, or leave the setting out")
		}
		for token := range strings.SplitSeq(value, ",") {
			if token = strings.TrimSpace(token); token == "" {
				return errors.New("a token is empty")
			}
			*field(c) = append(*field(c), token)
		}
		return nil
	}
}

func leases(field func(*settings) *[]client.Lease) func(*settings, string) error {
	return func(c *settings, value string) error {
		if value == "" {
			return nil
		}
		all := field(c)
		for lease := range strings.SplitSeq(value, ",") {
			policy, share, isBounded := strings.Cut(strings.TrimSpace(lease), "=")
			l := client.Lease{Policy: policy}
			if isBounded {
				var err error
				if l.MaxShare, err = strconv.ParseFloat(share, 64); err != nil || !(0 < l.MaxShare && l.MaxShare <= 1) {
					return fmt.Errorf("%q is no part of a capacity, such as 0.05, of policy %q", share, policy)
				}
			}
			switch {
			case policy == "":
				return errors.New("the name of a policy is empty")
			case slices.ContainsFunc(*all, func(other client.Lease) bool { return other.Policy == policy }):
				return fmt.Errorf("policy %q is there twice", policy)
			}
			*all = append(*all, l)
		}
		return nil
	}
}

func number(field func(*settings) *int) func(*settings, string) error {
	return func(c *settings, value string) error {
		n, err := strconv.ParseInt(value, 10, 32)
		if err != nil || n < 1 {
			return fmt.Errorf("%q is no whole number, 1 or more", value)
		}
		*field(c) = int(n)
		return nil
	}
}

func duration(field func(*settings) *time.Duration, least time.Duration) func(*settings, string) error {
	return func(c *settings, value string) error {
		d, err := time.ParseDuration(value)
		if err != nil || d < least || d%time.Millisecond != 0 {
			return fmt.Errorf("%q is no time in whole milliseconds, such as 500ms or 2s", value)
		}
		*field(c) = d
		return nil
	}
}

func boolean(field func(*settings) *bool) func(*settings, string) error {
	return func(c *settings, value string) error {
		b, err := strconv.ParseBool(value)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", value)
		}
		*field(c) = b
		return nil
	}
}
